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
    first, *others = pages(site)
    watched = open_page(first, scheme=scheme, width=width)
    for url in others:
        assert not watched.page.evaluate(IS_WIDER), watched.page.url
        watched.page.goto(url)
        assert watched.page.locator("h1").count() == 1
    watched.check(site)


def test_search_finds_a_setting_and_a_cause(site: str, open_page: Open) -> None:
    watched = open_page(pages(site)[0])
    page = watched.page
    for word, found in (("max_bypass", "No"), ("kv_watermark", "settings"), ("kv_quota", "causes")):
        page.keyboard.press("Escape")
        page.keyboard.press("/")
        page.keyboard.type(word)
        page.get_by_text(found).first.wait_for()
    watched.check(site)
