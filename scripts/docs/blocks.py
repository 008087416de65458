"""Code blocks of a page, and what is not run of them.

A comment before a block, invisible to readers, says what a run needs to know:

    <!-- not run: needs a cluster -->  the block is not run, and why
    <!-- file: tenants.yaml -->        the block is the content of a file, for the blocks after it
    <!-- shows: not_feasible -->       the commands may fail, but this text is in their output
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.docs.pages import DOCS, ROOT

SHELL = ("bash", "sh")
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>not run|file|shows): (?P<about>[^\n]*?) -->\n+)?"
    r"^(?P<indent> *)```(?P<language>[\w-]*)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
_CONTROL = {"&&", "||", "|", "&", ";", "(", ")"}


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    not_run: str = ""
    """Why the block is not run; empty if it is."""
    file: str = ""
    """Name of the file whose content the block is."""
    shows: str = ""
    """Text of the output of a block that may fail."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def documents() -> list[Path]:
    """Return README, CONTRIBUTING and every page, in reading order."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def blocks_of(path: Path) -> Iterator[CodeBlock]:
    """Yield the code blocks of a file."""
    text = path.read_text()
    for found in _BLOCK.finditer(text):
        mark, about = found["mark"], found["about"] or ""
        yield CodeBlock(
            page=str(path.relative_to(ROOT)),
            line=text.count("\n", 0, found.start("language")) + 1,
            language=found["language"],
            text=found["text"],
            not_run=about if mark == "not run" else "",
            file=about if mark == "file" else "",
            shows=about if mark == "shows" else "",
        )


def all_blocks() -> list[CodeBlock]:
    """Return the code blocks of all documents."""
    return [block for path in documents() for block in blocks_of(path)]


def headway_commands(script: str) -> Iterator[list[str]]:
    """Yield the arguments of every `headway` command of a shell script."""
    for line in _logical_lines(script):
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        command: list[str] = []
        for word in (*words, ";"):
            if word in _CONTROL:
                if command[:1] == ["headway"]:
                    yield _without_redirections(command[1:])
                command = []
            else:
                command.append(word)


def _logical_lines(script: str) -> Iterator[str]:
    """Yield lines with their continuations, without here-documents and quoted newlines."""
    end, pending = "", ""
    for line in script.splitlines():
        if end:
            end = "" if line == end else end
            continue
        pending += line
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        if _is_open(pending):
            pending += "\n"
            continue
        if found := re.search(r"<<'?(\w+)'?", pending):
            end = found[1]
        yield pending
        pending = ""


def _is_open(text: str) -> bool:
    """Whether a quotation of a line goes on in the next."""
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return True
    return False


def _without_redirections(words: list[str]) -> list[str]:
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word and set(word) <= set("<>"):
            next(rest, None)
        else:
            kept.append(word)
    return kept
