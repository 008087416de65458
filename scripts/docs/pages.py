"""The navigation, and titles, anchors and links of a page."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_FENCE = re.compile(r"^( *)(`{3,})(.*)$")
_HEADING = re.compile(r"^(#{1,6}) (.+)$")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_CODE = re.compile(r"(`+).+?\1")


class NavPage(NamedTuple):
    """A page of the navigation; `path` is relative to docs/."""

    title: str
    """Empty if the page's own heading is its title."""
    path: str


@dataclass(frozen=True, slots=True)
class NavSection:
    """Pages under one heading of the navigation."""

    title: str
    pages: tuple[NavPage, ...]


class Link(NamedTuple):
    """A link of a page, with the line that has it."""

    line: int
    target: str


def read_site() -> dict[str, Any]:
    """Return the settings of the site."""
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def navigation() -> list[NavSection]:
    """Return the sections of the site, without the start page."""
    sections = []
    for entry in read_site()["nav"]:
        [(title, content)] = entry.items()
        if isinstance(content, list):
            sections.append(NavSection(title, tuple(map(_nav_page, content))))
    return sections


def _nav_page(entry: str | dict[str, str]) -> NavPage:
    if isinstance(entry, str):
        return NavPage("", entry)
    [(title, path)] = entry.items()
    return NavPage(title, path)


def prose_lines(text: str) -> list[str]:
    """Return the lines of a page; those of code blocks and comments are empty."""
    hidden = _COMMENT.sub(lambda found: "\n" * found[0].count("\n"), text)
    lines, fence = [], ""
    for line in hidden.splitlines():
        found = _FENCE.match(line)
        if fence:
            is_end = found and found[2] == fence and not found[3]
            fence = "" if is_end else fence
            lines.append("")
        else:
            fence = found[2] if found else ""
            lines.append("" if found else line)
    return lines


def title_of(text: str) -> str:
    """Return the heading of a page."""
    return next(line[2:] for line in prose_lines(text) if line.startswith("# "))


def first_sentence(text: str) -> str:
    """Return the first sentence of a page's first paragraph, without markup."""
    paragraph: list[str] = []
    for line in prose_lines(text):
        is_text = line and line[0] not in "#|>-!"
        if paragraph and not is_text:
            break
        if is_text:
            paragraph.append(line)
    unlabelled = re.sub(r"^\*\*[^*]+[.:]\*\* ", "", " ".join(paragraph))
    plain = _without_markup(unlabelled)
    return re.split(r"(?<=[.?!:])(?<!\be\.g\.) (?=[A-Z`(])", plain, maxsplit=1)[0].rstrip(":")


def anchors_of(text: str) -> set[str]:
    """Return the anchors that a page has on the site and on GitHub alike."""
    return set(_anchors(text, _site_slug, "_")) & set(_anchors(text, _github_slug, "-"))


def links_of(text: str) -> Iterator[Link]:
    """Yield the links of a page, images included."""
    for number, line in enumerate(prose_lines(text), start=1):
        for found in _LINK.finditer(_CODE.sub("", line)):
            yield Link(number, found[1])


def _without_markup(text: str) -> str:
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"[`*]", "", plain).strip()


def _anchors(text: str, slug: Any, separator: str) -> Iterator[str]:
    seen: dict[str, int] = {}
    for line in prose_lines(text):
        if found := _HEADING.match(line):
            name = slug(_without_markup(found[2]))
            number = seen[name] = seen.get(name, -1) + 1
            yield f"{name}{separator}{number}" if number else name


def _site_slug(heading: str) -> str:
    ascii_only = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip().lower())


def _github_slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
