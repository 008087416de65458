"""The dashboard in a browser, under load."""

from __future__ import annotations

import importlib
import threading
from typing import Any

import httpx
import pytest

from benchmarks.support.servers import RunningServer
from tests.browser.conftest import ADMIN, FAIRNESS, TENANTS, USER, Open, ask, load

pytestmark = pytest.mark.browser
API = "/dashboard/api"
HEADERS = {"Authorization": f"Bearer {ADMIN}"}
PAGES = {
    "": "Requests waiting, by cause",
    "tenants": "Tenants",
    "requests": "Slowest now",
    "engines": "Engines",
    "settings": "Settings",
}
XSS = (
    "<script>alert({n})</script>", "<img/src=x/onerror=alert({n})>", "<svg/onload=alert({n})>",
    "\"><script>alert({n})</script>", "'-alert({n})-'", "javascript:alert({n})",
    "</script><script>alert({n})</script>", "<iframe/srcdoc='<script>alert({n})</script>'>",
    "{{{{alert({n})}}}}", "${{alert({n})}}", "__proto__{n}", "<a/href=javascript:alert({n})>x</a>",
    "<style>*{{display:none}}</style>{n}", "&lt;script&gt;alert({n})&lt;/script&gt;",
)  # fmt: skip


def address(server: RunningServer) -> str:
    return f"127.0.0.1:{server.admin_port}"


def get(server: RunningServer, path: str) -> Any:
    return httpx.get(f"{server.admin_url}{API}{path}", headers=HEADERS).json()


def serious(page: Any) -> list[str]:
    """The serious findings of axe."""
    axe = importlib.import_module("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page).response["violations"]
    return [
        f"{one['id']}: {one['nodes'][0]['html'][:200]}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_page_loads_without_an_error(
    server: RunningServer, open_page: Open, scheme: str, width: int
) -> None:
    with load(server):
        watched = open_page(f"{server.admin_url}/dashboard", ADMIN, scheme, width)
        page = watched.page
        page.wait_for_selector(".plot canvas")
        page.get_by_text("all waits").wait_for()
        for path, text in PAGES.items():
            page.evaluate(f"location.hash = '#/{path}'")
            page.get_by_text(text, exact=True).first.wait_for()
            assert not serious(page), path
            is_wider = "document.documentElement.scrollWidth > innerWidth"
            assert not page.evaluate(is_wider), path
        watched.check(address(server))


def test_each_chart_has_a_table_that_the_keyboard_opens(
    server: RunningServer, open_page: Open
) -> None:
    with load(server):
        watched = open_page(f"{server.admin_url}/dashboard", ADMIN)
        page = watched.page
        page.get_by_text("all waits").wait_for()
        buttons = page.locator("button[aria-expanded]")
        charts = page.locator("section:has(.plot)")
        assert buttons.count() >= charts.count() >= 6
        for number in range(charts.count()):
            chart = charts.nth(number)
            assert "Now:" in chart.locator(".plot").get_attribute("aria-label")
            chart.locator("button[aria-expanded]").focus()
            page.keyboard.press("Enter")
            assert chart.locator(".scroll table tbody tr").count() >= 100
        # The causes of the table add up to its last row.
        page.keyboard.press("Tab")
        watched.check(address(server))


def test_the_key_is_asked_for_and_is_in_no_url(server: RunningServer, open_page: Open) -> None:
    watched = open_page(f"{server.admin_url}/dashboard")
    page, urls = watched.page, list[str]()
    page.on("request", lambda request: urls.append(request.url))
    page.get_by_label("Key").fill("wrong")
    page.keyboard.press("Enter")
    page.get_by_role("alert").get_by_text("valid API key").wait_for()
    page.get_by_label("Key").fill(ADMIN)
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Requests waiting, by cause").wait_for()
    assert urls and not any(ADMIN in url for url in urls)
    assert not page.evaluate("localStorage.length + document.cookie.length")
    page.get_by_role("button", name="Forget the key").click()
    page.get_by_text("An administrator's key is needed").wait_for()
    assert page.evaluate("sessionStorage.length") == 0
    assert not serious(page)
    watched.check(address(server))


def test_the_waterfall_adds_up_to_the_account(server: RunningServer, open_page: Open) -> None:
    with load(server, 16):
        ids = [ask(server, TENANTS[0]).json()["id"] for _ in range(3)]
    watched = open_page(f"{server.admin_url}/dashboard#/requests/{ids[0]}", ADMIN)
    for request_id in ids:
        watched.page.evaluate(f"location.hash = '#/requests/{request_id}'")
        watched.page.get_by_role("heading", name=request_id).wait_for()
        shown = watched.page.locator("#pieces-sum")
        account = get(server, f"/requests/{request_id}")
        total, duration = (
            float(shown.get_attribute(f"data-{one}")) for one in ("total", "duration")
        )
        assert duration == pytest.approx(account["duration_s"])
        assert total == pytest.approx(account["duration_s"], abs=2e-3)
        waited = sum(one["seconds"] for one in account.get("causes", ()))
        assert waited == pytest.approx(account.get("queue_s", 0.0))
    watched.check(address(server))


def test_an_abort_from_the_page_frees_the_blocks(server: RunningServer, open_page: Open) -> None:
    answers: list[httpx.Response] = []
    body = {"prompt": "a long one", "max_tokens": 1500}
    asking = threading.Thread(target=lambda: answers.append(ask(server, "search", **body)))
    asking.start()
    watched = open_page(f"{server.admin_url}/dashboard#/requests", ADMIN)
    page = watched.page
    page.locator("section[aria-label='Slowest now'] a").first.click()
    page.get_by_role("button", name="Abort", exact=True).click()
    page.get_by_role("button", name="Really abort?").click()
    page.get_by_text("finished (abort)").wait_for()
    asking.join(20)
    assert answers[0].status_code == 409
    engine = get(server, "/engines")["engines"][0]
    assert (engine["num_running"], engine["kv_usage"]) == (0, 0.0)
    watched.check(address(server))


def test_drain_and_undrain_from_the_page(server: RunningServer, open_page: Open) -> None:
    watched = open_page(f"{server.admin_url}/dashboard#/engines", ADMIN)
    page = watched.page
    page.get_by_role("button", name="Drain", exact=True).click()
    page.get_by_role("button", name="Really refuse new requests?").click()
    page.get_by_role("button", name="Accept requests again").wait_for()
    assert ask(server, "search").status_code == 503
    page.get_by_role("button", name="Accept requests again").click()
    page.get_by_role("button", name="Drain", exact=True).wait_for()
    assert ask(server, "search").status_code == 200
    watched.check(address(server))


def test_two_hundred_names_that_look_like_code_are_text(
    server: RunningServer, open_page: Open
) -> None:
    names = [XSS[n % len(XSS)].format(n=n) for n in range(210)]
    with httpx.Client(timeout=60) as client:
        for name in names:
            headers = {**HEADERS, FAIRNESS: name, "X-Request-Id": name}
            body = {"prompt": name, "max_tokens": 1, "user": name}
            client.post(f"{server.url}/v1/completions", json=body, headers=headers)
    watched = open_page(f"{server.admin_url}/dashboard", ADMIN)
    page = watched.page
    page.get_by_role("heading", name="Requests waiting, by cause").wait_for()
    for path in ("tenants", "requests", "engines", "settings"):
        page.evaluate(f"location.hash = '#/{path}'")
        page.wait_for_timeout(300)
        assert page.locator("main script, main iframe, main img, main svg, main style").count() == 0
    page.evaluate("location.hash = '#/tenants'")
    page.get_by_label("Name contains").fill("<script>alert(196)")
    page.get_by_text("<script>alert(196)</script>").first.wait_for()
    for name in names[:14]:
        page.evaluate("name => { location.hash = '#/requests/' + encodeURIComponent(name) }", name)
        page.get_by_role("heading", name=name, exact=True).wait_for()
    watched.check(address(server))


def test_a_user_of_the_playground(server: RunningServer, open_page: Open) -> None:
    watched = open_page(f"{server.url}/playground")
    page = watched.page
    page.get_by_text("a key is needed").wait_for()
    assert not serious(page)
    page.get_by_label("API key").fill(USER)
    page.get_by_label("API key").blur()
    page.get_by_text("ready", exact=True).wait_for()
    page.get_by_label("Max tokens").fill("20")
    page.get_by_label("Message", exact=True).fill("<img src=x onerror=alert(1)>")
    page.keyboard.press("Control+Enter")
    page.get_by_text("20 output tokens").wait_for()
    assert page.locator("#messages img").count() == 0
    assert page.locator("#strip .token").count() >= 2
    page.get_by_role("button", name="Explain this request").click()
    page.get_by_text("Request chatcmpl-").wait_for()
    assert not serious(page)
    page.get_by_label("Max tokens").fill("1500")
    page.get_by_label("Message", exact=True).fill("more")
    page.get_by_role("button", name="Send").click()
    page.locator("#messages li").nth(3).locator(".text", has_text="a").wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("stopped", exact=True).wait_for()
    # The key of a user opens nothing of the dashboard.
    assert (
        httpx.get(
            f"{server.admin_url}{API}/tenants", headers={"Authorization": f"Bearer {USER}"}
        ).status_code
        == 403
    )
    watched.check(f"127.0.0.1:{server.port}")
