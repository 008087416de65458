"""The dashboard in a browser, under load."""

from __future__ import annotations

import importlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from benchmarks.support.fleets import Fleet
from benchmarks.support.servers import Launcher, RunningServer
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


def chunks(*deltas: dict[str, Any], reason: str) -> str:
    """The stream of an answer, as the server writes it."""
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": reason})
    events = [json.dumps({"id": "chatcmpl-1", "choices": [one]}) for one in choices]
    return "".join(f"data: {one}\n\n" for one in (*events, "[DONE]"))


def test_tools_and_schemas_in_the_playground(server: RunningServer, open_page: Open) -> None:
    code = "<img src=x onerror=alert(1)>"
    begin = {"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": ""}}
    rest = {"index": 0, "function": {"arguments": json.dumps({"city": code})}}
    answers = [
        chunks({"tool_calls": [begin]}, {"tool_calls": [rest]}, reason="tool_calls"),
        chunks({"content": "It is warm."}, reason="stop"),
    ]
    bodies: list[dict[str, Any]] = []

    def answer(route: Any) -> None:
        bodies.append(route.request.post_data_json)
        route.fulfill(body=answers.pop(0), content_type="text/event-stream")

    watched = open_page(f"{server.url}/playground", USER)
    page = watched.page
    page.route("**/v1/chat/completions", answer)
    page.get_by_text("ready", exact=True).wait_for()
    message = page.get_by_label("Message", exact=True)
    page.get_by_label("Tools").fill("[{")
    message.fill("How warm is it?")
    page.keyboard.press("Control+Enter")
    page.get_by_text("Tools: not valid JSON").wait_for()
    assert message.input_value() == "How warm is it?"  # nothing is lost
    tools = [{"type": "function", "function": {"name": "weather"}}]
    page.get_by_label("Tools").fill(json.dumps(tools))
    page.get_by_role("combobox", name="Answer").select_option("json_schema")
    page.get_by_label("JSON schema").fill('{"type": "object"}')
    assert not serious(page)
    message.press("Control+Enter")
    page.get_by_text(f"weather({json.dumps({'city': code})})").wait_for()
    assert page.locator("#messages img").count() == 0
    assert "Result of weather(" in message.get_attribute("placeholder")
    message.fill("21 degrees")
    message.press("Control+Enter")
    page.get_by_text("It is warm.").wait_for()
    assert "Ask something" in message.get_attribute("placeholder")
    first, second = bodies
    assert first["tools"] == tools
    assert first["response_format"]["json_schema"]["schema"] == {"type": "object"}
    call, result = second["messages"][-2:]
    assert [one["id"] for one in call["tool_calls"]] == ["call_1"]
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees"}
    watched.check(f"127.0.0.1:{server.port}")


def test_ten_thousand_tenants_do_not_break_the_page(launch: Launcher, open_page: Open) -> None:
    server = launch(
        server={"trusted_proxy": ["127.0.0.1"], "max_num_queued_reqs": 4096},
        scheduling_policy="fair", step_s=0.0, max_num_seqs=256, num_blocks=4096,
    ).wait_ready()  # fmt: skip
    body = {"prompt": "x", "max_tokens": 1}

    def ask_as(numbers: range) -> None:
        with httpx.Client(base_url=server.url, timeout=60, verify=False) as client:
            for number in numbers:
                headers = {FAIRNESS: f"tenant-{number:05}"}
                answer = client.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == 200

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask_as, [range(start, start + 1250) for start in range(0, 10_000, 1250)]))
    ask_as(range(9_999, 10_000))  # the last to arrive is among those that are counted apart
    url, num_bytes = f"{server.admin_url}{API}", list[int]()
    for path in ("/tenants", "/requests", "/tenants?search=tenant-0"):
        num_bytes.append(len(httpx.get(url + path).content))
    assert max(num_bytes) < 100_000
    watched = open_page(f"{server.admin_url}/dashboard")
    page = watched.page
    page.get_by_role("heading", name="Requests waiting, by cause").wait_for()
    assert page.evaluate("document.querySelectorAll('*').length") < 5000
    page.evaluate("location.hash = '#/tenants'")
    page.get_by_text("all others").wait_for()
    rows = page.locator("section[aria-label='Tenants'] tbody tr")
    assert rows.count() == 65
    page.get_by_label("Name contains").fill("tenant-09999")
    page.get_by_text("tenant-09999").wait_for()
    for path, text in PAGES.items():
        page.evaluate(f"location.hash = '#/{path}'")
        page.get_by_text(text, exact=True).first.wait_for()
    assert not serious(page)
    watched.check(address(server))


def test_a_frontend_says_what_its_page_does_not_show(fleet: Fleet, open_page: Open) -> None:
    for _ in range(2):
        fleet.start_engine()
    server = fleet.start_frontend().wait_ready()
    watched = open_page(f"{server.admin_url}/dashboard#/engines")
    page = watched.page
    page.get_by_text("Other frontends have pages of their own").wait_for()
    for engine in fleet.engines:
        page.get_by_role("heading", name=engine.address).wait_for()
    assert not serious(page)
    watched.check(address(server))


def test_frontends_of_one_router_show_each_other(fleet: Fleet, open_page: Open) -> None:
    fleet.start_engine()
    router = fleet.start_router()
    servers = [fleet.start_frontend(router=[router.address]).wait_ready() for _ in range(2)]
    watched = open_page(f"{servers[0].admin_url}/dashboard#/engines")
    table = watched.page.get_by_role("region", name="Frontends that share the router")
    for server in servers:
        table.get_by_text(f":{server.process.pid}").wait_for()
    assert table.get_by_text("(this one)").count() == 1
    assert not serious(watched.page)
    watched.check(address(servers[0]))
    router.kill()
    watched.page.get_by_text("This frontend decides by itself now").wait_for()
