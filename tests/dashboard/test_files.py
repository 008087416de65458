"""The static files: complete, unchanged, and without what the policy of the page forbids."""

from __future__ import annotations

import hashlib
import json
import re
from importlib.resources import files
from pathlib import Path

import pytest

from headway.dashboard.files import CSP, DASHBOARD, PLAYGROUND, TYPES

STATIC = Path(str(files("headway.dashboard") / "static"))
OWN = sorted(path for path in STATIC.glob("*") if path.suffix in (".js", ".html"))


def test_vendored_files_are_those_of_their_packages() -> None:
    manifest = json.loads((STATIC / "vendor" / "vendored.json").read_text())
    listed = {name: digest for one in manifest["packages"] for name, digest in one["files"].items()}
    found = {path.name for path in (STATIC / "vendor").iterdir()} - {"vendored.json"}
    assert found == set(listed)
    for name, digest in listed.items():
        content = (STATIC / "vendor" / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest, name
    for one in manifest["packages"]:
        assert any(name.endswith(".LICENSE") for name in one["files"])
        assert one["version"] and one["licence"] and one["integrity"].startswith("sha512-")


def test_every_file_is_served_and_every_import_leads_to_one() -> None:
    served = {*DASHBOARD, *PLAYGROUND, "dashboard.html", "playground.html"}
    there = {
        str(path.relative_to(STATIC))
        for path in STATIC.rglob("*")
        if path.suffix.lstrip(".") in TYPES
    }
    assert served == there
    for names, page in ((DASHBOARD, "dashboard"), (PLAYGROUND, "playground")):
        text = (STATIC / f"{page}.html").read_text()
        for link in re.findall(r'(?:href|src)="(/[^"]+)"', text):
            assert link.removeprefix(f"/{page}/static/") in names
        for name in names:
            if name.endswith(".js") and not name.startswith("vendor/"):
                for other in re.findall(r'from "\./([^"]+)"', (STATIC / name).read_text()):
                    assert other in names, (name, other)


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_nothing_inline_and_no_way_to_make_html_from_text(path: Path) -> None:
    text = path.read_text()
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
    ):
        assert word not in text
    assert "dangerouslySetInnerHTML" not in text
    assert not re.search(r"https?://(?!www\.w3\.org/)", text)
    if path.suffix == ".html":
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)", text)


def test_the_policy_allows_nothing_but_the_own_origin() -> None:
    parts = [part.strip().partition(" ") for part in CSP.split(";")]
    policy = {name: value for name, _, value in parts}
    assert policy["default-src"] == "'none'"
    for kind in ("script-src", "style-src", "connect-src"):
        assert policy[kind] == "'self'"
    assert policy["img-src"] == "'self' data:"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert "unsafe" not in CSP and "http" not in CSP
