"""Writes the pages that are made of others or of the code; `--check` only compares.

src/headway               ->  docs/reference/
mkdocs.yml, README, docs  ->  docs/index.md, docs/llms.txt
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache

from scripts.docs.fields import fields_page
from scripts.docs.pages import DOCS, ROOT, NavPage, first_sentence, navigation, title_of
from scripts.docs.reference import (
    causes_page,
    commands_page,
    metrics_page,
    page,
    settings_page,
)

REFERENCE: dict[str, Callable[[], str]] = {
    "reference/settings.md": settings_page,
    "reference/cli.md": commands_page,
    "reference/fields.md": fields_page,
    "reference/metrics.md": metrics_page,
    "reference/causes.md": causes_page,
}
MAX_LINE = 240
"""Longest summary of a page in llms.txt."""


def index_page() -> str:
    """Return the start page: what Headway is, and every page by task."""
    parts = _introduction()
    for section in navigation():
        parts += [f"## {section.title}", "\n".join(map(_index_line, section.pages))]
    return page("Headway", "mkdocs.yml and README.md", *parts)


def _index_line(one: NavPage) -> str:
    if not one.title:
        return f"- [{_title(one)}]({one.path})"
    return f"- [{one.title}]({one.path}): {_title(one)}"


def llms_text() -> str:
    """Return the list of pages for programs that read the documentation."""
    parts = ["# Headway", "> " + " ".join(_introduction()[0].split())]
    for section in navigation():
        parts += [f"## {section.title}", "\n".join(map(_llms_line, section.pages))]
    return "\n\n".join(parts) + "\n"


def _llms_line(one: NavPage) -> str:
    line = f"- [{_title(one)}]({one.path})"
    return f"{line}: {_summary(one)}" if one.title else line


def outdated() -> list[str]:
    """Return the files that differ from what they would be made."""
    return [path for path, text in _made().items() if not _is_current(path, text)]


def _made() -> dict[str, str]:
    made = {path: _reference(path) for path in REFERENCE}
    return made | {"index.md": index_page(), "llms.txt": llms_text()}


@cache
def _reference(path: str) -> str:
    return REFERENCE[path]()


def _is_current(path: str, text: str) -> bool:
    file = DOCS / path
    return file.is_file() and file.read_text() == text


def _introduction() -> list[str]:
    """Return the first two paragraphs of the README."""
    return re.split(r"\n\n+", (ROOT / "README.md").read_text())[1:3]


def _text(one: NavPage) -> str:
    return _reference(one.path) if one.path in REFERENCE else (DOCS / one.path).read_text()


def _title(one: NavPage) -> str:
    return title_of(_text(one))


def _summary(one: NavPage) -> str:
    text = first_sentence(_text(one))
    return text if len(text) <= MAX_LINE else text[:MAX_LINE].rsplit(" ", 1)[0] + " ..."


def main() -> int:
    """Write or compare; return the exit code."""
    if "--check" in sys.argv[1:]:
        for path in (found := outdated()):
            print(f"docs/{path} is out of date: run scripts/build-docs --generate", file=sys.stderr)
        return bool(found)
    for path, text in _made().items():
        if not _is_current(path, text):
            (DOCS / path).parent.mkdir(exist_ok=True)
            (DOCS / path).write_text(text)
            print(f"docs/{path} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
