"""Chromium, and a server with the fake engine under the load of three tenants."""

from __future__ import annotations

import importlib
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.support.fleets import Fleet
from benchmarks.support.servers import Launcher, RunningServer
from headway.tenancy.keys import digest_of, write_digest

CHROMIUM = "/usr/bin/chromium"
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
ADMIN, USER = "hw-key-of-the-admin", "hw-key-of-a-user"
TENANTS = ("search", "chat", "nightly")
FAIRNESS = "x-gateway-inference-fairness-id"


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    sync_api = importlib.import_module("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, tokenizer_path: Path) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("browser")
    file = folder / "tenants.yaml"
    file.write_text(
        f"tenants:\n  root: {{keys: ['{write_digest(digest_of(ADMIN.encode()))}'], admin: true}}\n"
        f"  user: {{keys: ['{write_digest(digest_of(USER.encode()))}']}}\n"
    )
    launcher = Launcher(folder, tokenizer_path)
    settings = {"tenants_file": str(file), "trusted_proxy": ["127.0.0.1"]}
    made = launcher(
        server=settings, scheduling_policy="fair", step_s=0.01, max_num_seqs=6, num_blocks=160
    ).wait_ready(ADMIN)
    yield made
    launcher.close()


@pytest.fixture
def fleet(tmp_path: Path, tokenizer_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path, tokenizer_path)
    yield made
    made.close()


def ask(server: RunningServer, tenant: str, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {ADMIN}", FAIRNESS: tenant}
    body = {"prompt": "x" * 40, "max_tokens": 40, **body}
    # Without `verify=False`, httpx reads all CA certificates for each call.
    url = f"{server.url}/v1/completions"
    return httpx.post(url, json=body, headers=headers, timeout=60, verify=False)


@contextmanager
def load(server: RunningServer, num_clients: int = 12) -> Iterator[None]:
    """Requests of three tenants, one of them with targets, until the block ends."""
    over = threading.Event()
    numbers = itertools.count()

    def run(index: int) -> None:
        tenant = TENANTS[index % len(TENANTS)]
        targets = {"ttft_ms": 2000} if tenant == "chat" else {}
        while not over.is_set():
            ask(server, tenant, prompt=f"{next(numbers)} " * 12, **targets)

    clients = [threading.Thread(target=run, args=(index,)) for index in range(num_clients)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        over.set()
        for client in clients:
            client.join()


class Watched:
    """A page, and all that must not happen on it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.problems: list[str] = []
        self.hosts: set[str] = set()
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("dialog", self._on_dialog)
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))

    def _on_console(self, message: Any) -> None:
        # A missing key is asked for with a 401, which the browser reports as an error.
        if message.type in ("error", "warning") and "401" not in message.text:
            self.problems.append(f"{message.type}: {message.text}")

    def _on_dialog(self, dialog: Any) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def check(self, *hosts: str) -> None:
        assert not self.problems
        assert self.hosts <= set(hosts)


Open = Callable[..., Watched]


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Open]:
    contexts: list[Any] = []

    def make(url: str, key: str = "", scheme: str = "light", width: int = 1280) -> Watched:
        context = chromium.new_context(
            color_scheme=scheme, viewport={"width": width, "height": 900}, reduced_motion="reduce"
        )
        contexts.append(context)
        context.set_default_timeout(15_000)
        if key:
            context.add_init_script(f"sessionStorage.setItem('headway-key', '{key}')")
        watched = Watched(context.new_page())
        watched.page.goto(url)
        return watched

    yield make
    for context in contexts:
        context.close()
