"""Links, anchors, the navigation, and pages that are made of the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from headway.cli.quick_serve import SERVE_SECTIONS, flag_of
from headway.config import SECTIONS
from scripts.docs.generate import outdated
from scripts.docs.pages import (
    DOCS,
    ROOT,
    anchors_of,
    first_sentence,
    links_of,
    navigation,
    prose_lines,
    read_site,
    title_of,
)

PAGES = sorted(DOCS.rglob("*.md"))
LINKED = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *PAGES,
]
_ITEM = re.compile(r"([-*]|\d+\.) ")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def broken_links(path: Path) -> Iterator[str]:
    for line, target in links_of(path.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        place = f"{name_of(path)}:{line} {target}"
        if not file.exists():
            yield f"{place}: no such file"
        elif path.is_relative_to(DOCS) and not file.is_relative_to(DOCS):
            yield f"{place}: not a part of the site"
        elif anchor and anchor not in anchors_of(file.read_text()):
            yield f"{place}: no such heading"


def test_every_link_and_anchor_leads_somewhere() -> None:
    assert [problem for path in LINKED for problem in broken_links(path)] == []


def test_links_of_code_do_not_count_and_anchors_are_slugs() -> None:
    text = "# A `b` c\n\n[x](#a-b-c) [y](#a-c)\n\n```\n[z](none.md)\n```\n`[w](none.md)`\n"
    assert [link.target for link in links_of(text)] == ["#a-b-c", "#a-c"]
    assert anchors_of(text) == {"a-b-c"}
    assert anchors_of("## A - b\n## One\n## One\n") == {"one"}, "others differ on GitHub"


def test_the_navigation_has_every_page_once() -> None:
    listed = [one.path for section in navigation() for one in section.pages]
    assert sorted(["index.md", *listed]) == [str(path.relative_to(DOCS)) for path in PAGES]


def test_every_page_begins_with_its_title_and_an_answer() -> None:
    for path in PAGES:
        text = path.read_text()
        assert text.startswith(f"# {title_of(text)}\n"), path
        assert len(first_sentence(text)) > 20, path


def test_lists_and_tables_begin_after_an_empty_line() -> None:
    """GitHub does without it; the site would show one paragraph."""
    found = []
    for path in PAGES:
        lines = prose_lines(path.read_text())
        for number, (before, line) in enumerate(pairwise(lines), start=2):
            is_text = before and not before.startswith(("#", "|", " ")) and not _ITEM.match(before)
            if is_text and (_ITEM.match(line) or line.startswith("|")):
                found.append(f"{name_of(path)}:{number}")
    assert not found


def test_pages_made_of_the_code_are_current() -> None:
    assert outdated() == [], "run scripts/build-docs --generate"


def test_the_site_loads_nothing_from_other_hosts() -> None:
    site = read_site()
    assert site["theme"]["font"] is False
    assert site["strict"] is True
    assert not any("//" in name for name in site["extra_css"])
    assert not any("```mermaid" in path.read_text() for path in PAGES)  # its script is on a CDN


@pytest.mark.parametrize("title", ["From vLLM", "From llama.cpp"])
def test_flags_to_move_to_exist(title: str) -> None:
    text = (DOCS / "guides" / "moving.md").read_text()
    section = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
    kinds = [SECTIONS[name] for name in SERVE_SECTIONS]
    names = [name for kind in kinds for name in kind.__dataclass_fields__]
    flags = {flag_of(name) for name in names} | {flag_of(f"no_{name}") for name in names}
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    for old, new in rows:
        told = re.findall(r"`(--[\w-]+)", old if new.strip() == "the same" else new)
        assert set(told) <= flags, old
