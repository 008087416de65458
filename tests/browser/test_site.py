"""The documentation as a site."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from scripts.docs.pages import ROOT, navigation
from tests.browser.conftest import Open

pytestmark = pytest.mark.browser
IS_WIDER = "document.documentElement.scrollWidth > innerWidth"


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The built site on a free port, as host and port."""
    subprocess.run([ROOT / "scripts" / "build-docs"], check=True)
    serve = partial(_Quiet, directory=str(ROOT / "site"))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def pages(site: str) -> list[str]:
    names = ["index.md", *(one.path for section in navigation() for one in section.pages)]
    return [f"http://{site}/{name.removesuffix('.md')}.html" for name in names]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_page_loads_and_fits(site: str, open_page: Open, scheme: str, width: int) -> None:
    watched = open_page(f"http://{site}/", scheme=scheme, width=width)
    for url in pages(site):
        watched.page.goto(url)
        assert watched.page.locator("h1").count() == 1, url
        assert not watched.page.evaluate(IS_WIDER), url
    watched.check(site)


@pytest.mark.parametrize(
    ("word", "page"),
    [("kv-watermark", "reference/settings"), ("ThinkingOptions", "reference/fields")],
)
def test_search_finds_a_word(site: str, open_page: Open, word: str, page: str) -> None:
    watched = open_page(pages(site)[0])
    watched.page.wait_for_load_state("networkidle")
    watched.page.locator(".md-search__button").click()
    watched.page.locator("input:visible").first.fill(word)
    found = watched.page.locator(f"a[href*='{page}.html?h=']").first
    found.wait_for()
    found.click()
    watched.page.wait_for_url(f"**/{page}.html**")
    watched.check(site)
