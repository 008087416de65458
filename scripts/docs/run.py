"""Runs the code blocks of pages: one shell per page, with the real model.

Each page has a folder of its own with the repository's folders in it, and a network of its own, so
that the ports that the docs name are free. It ends with all processes that it started. A server
that a page starts runs until the page starts another. A page that asks a server (or its ledger)
and starts none finds one with the name smollm2.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from scripts.docs.blocks import SHELL, CodeBlock, all_blocks
from scripts.docs.pages import ROOT

PAGE_TIMEOUT_S = 1800.0
ALONE = (
    *("unshare", "--map-root-user", "--net"),
    *("--pid", "--fork", "--kill-child", "--mount-proc"),
)
"""Runs a command with ports of its own; what it leaves running ends with it."""
KNOWN_FOLDERS = ("benchmarks", "deploy", "docs", "examples", "scripts", "tests")
REPLACED = {
    "scripts/setup && source .venv/bin/activate": "true",
    "path/to/model.gguf": "{model}",
}
"""What stands for something else: the environment is there already, and so is a model."""
_DONE = re.compile(r"^@@ (\S+)$", re.MULTILINE)
_ASKS = re.compile(r"(?:127\.0\.0\.1|localhost):800[01]|headway usage")
_STARTS = re.compile(r"headway (?:serve|frontend|fleet up)\b")

PRELUDE = r"""
set -u
ip link set lo up
server=
wait_ready() {
  for _ in $(seq 600); do
    command curl -sf http://127.0.0.1:8000/health/ready >/dev/null && return
    kill -0 "$server" 2>/dev/null || { echo "the server ended" >&2; return 1; }
    sleep 0.1
  done
  echo "the server was not ready in time" >&2
  return 1
}
stop_server() {
  [ -n "$server" ] || return 0
  kill -TERM "$server" 2>/dev/null || true
  wait "$server" 2>/dev/null || true
  server=
}
# Servers run in the background; what takes minutes only for the sake of precision is shortened.
headway() {
  case "$1" in
    serve | frontend)
      stop_server
      command headway "$@" >>server.log 2>&1 &
      server=$!
      wait_ready || { tail -20 server.log >&2; return 1; }
      ;;
    profile) command headway "$@" --seconds 30 ;;
    plan) command headway "$@" --runs 2 ;;
    simulate) command headway "$@" --runs 2 ;;
    fleet)
      [ "$2" != up ] || stop_server
      command headway "$@"
      ;;
    *) command headway "$@" ;;
  esac
}
curl() { command curl --fail-with-body --no-progress-meter --max-time 120 "$@"; }
"""


@dataclass(frozen=True, slots=True)
class PageRun:
    """What came of the blocks of one page."""

    page: str
    seconds: float
    passed: tuple[str, ...]
    failed: tuple[str, ...]
    output: str


@dataclass(slots=True)
class Tally:
    """Blocks by what was done with them."""

    run: list[CodeBlock] = field(default_factory=list)
    files: list[CodeBlock] = field(default_factory=list)
    skipped: list[CodeBlock] = field(default_factory=list)
    other: list[CodeBlock] = field(default_factory=list)
    """Output, pictures and files of settings: no code."""

    def add(self, block: CodeBlock) -> None:
        if block.not_run:
            self.skipped.append(block)
        elif block.file:
            self.files.append(block)
        elif block.language in (*SHELL, "python"):
            self.run.append(block)
        else:
            self.other.append(block)


def sort_blocks(blocks: Iterable[CodeBlock]) -> Tally:
    """Return blocks by what is done with them."""
    tally = Tally()
    for block in blocks:
        tally.add(block)
    return tally


def script_of(blocks: Iterable[CodeBlock], model: str) -> str:
    """Return the shell script of a page; it names each block that ended well."""
    parts = [PRELUDE, f"model={shlex.quote(model)}"]
    is_served = False
    for number, block in enumerate(blocks):
        text = block.text
        for old, new in REPLACED.items():
            text = text.replace(old, new.format(model=model))
        if block.file:
            parts.append(_write_file(block.file, text))
            continue
        if _ASKS.search(text) and not is_served and not _STARTS.search(text):
            parts.append('headway serve "$model" --served-model-name smollm2 || exit 1')
            is_served = True
        if block.language == "python":
            parts.append(_write_file(f"block-{number}.py", text))
            text = f"python block-{number}.py"
        parts.append(_checked(text, block.shows))
        parts.append(f"echo; echo '@@ {block.place}'")
        is_served = (is_served or bool(_STARTS.search(text))) and "headway fleet down" not in text
    return "\n".join(parts)


def _checked(text: str, shows: str) -> str:
    """Return commands that end the script if one fails, or if a text is not shown."""
    if not shows:
        return f"set -e +u\n{text}\nset +e"
    shown = f'shown=$({text}\n)\necho "$shown"'
    return f'{shown}\ngrep -q {shlex.quote(shows)} <<<"$shown" || exit 1'


def _write_file(name: str, text: str) -> str:
    return f"printf '%s' {shlex.quote(text)} > {shlex.quote(name)}"


def run_page(page: str, blocks: list[CodeBlock], model: str, folder: Path) -> PageRun:
    """Run the blocks of a page in order; a block that fails ends the page."""
    for name in KNOWN_FOLDERS:
        (folder / name).symlink_to(ROOT / name)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    state = {
        "HOME": str(folder),
        "XDG_STATE_HOME": str(folder / "state"),
        "XDG_CACHE_HOME": str(cache),
        "HEADWAY_CACHE": os.environ.get("HEADWAY_CACHE") or str(cache / "headway"),
    }
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))}
    started = time.monotonic()
    log = folder / "output.log"
    with log.open("w") as output, suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [*ALONE, "bash", "-c", script_of(blocks, model)],
            cwd=folder,
            env={**os.environ, **state, **paths},
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            check=False,
            timeout=PAGE_TIMEOUT_S,
        )
    text = log.read_text(errors="replace")
    ended = {found[1] for found in _DONE.finditer(text)}
    places = [block.place for block in blocks if not block.file]
    return PageRun(
        page,
        time.monotonic() - started,
        tuple(place for place in places if place in ended),
        tuple(place for place in places if place not in ended),
        text,
    )


def main() -> int:
    """Run the pages that the arguments name, or all; return the exit code."""
    model, *named = sys.argv[1:]
    blocks = [one for one in all_blocks() if not named or one.page in named]
    tally = sort_blocks(blocks)
    failed: list[str] = []
    for page in dict.fromkeys(block.page for block in tally.run):
        of_page = [one for one in blocks if one.page == page and one in (*tally.run, *tally.files)]
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
            done = run_page(page, of_page, model, Path(made))
        print(f"{page}: {len(done.passed)} of {len(done.passed + done.failed)} blocks", end="")
        print(f", {done.seconds:.0f} s", flush=True)
        failed += done.failed
        if done.failed:
            print(f"--- {done.failed[0]} failed, with those after it:\n{done.output[-4000:]}")
    print(f"run: {len(tally.run) - len(failed)} of {len(tally.run)} blocks", end="")
    print(f"; {len(tally.files)} files; {len(tally.other)} without code (output, settings)")
    for block in tally.skipped:
        print(f"not run: {block.place}: {block.not_run}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
