"""Code blocks of README and docs: Python compiles, and `headway` commands are parsed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from typing import Any

import pytest
from typer.main import get_command

from headway.cli.app import make_app
from headway.config import SECTIONS, load_config
from scripts.docs.blocks import SHELL, CodeBlock, all_blocks, documents, headway_commands
from scripts.docs.pages import ROOT, prose_lines
from scripts.docs.run import script_of, sort_blocks

BLOCKS = all_blocks()
SETTINGS = {spec.name for kind in SECTIONS.values() for spec in fields(kind)}
LANGUAGES = {*SHELL, "python", "yaml", "json", "text", ""}


@cache
def root() -> Any:
    return get_command(make_app())


def resolve(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the words name, and the words after it."""
    command, rest = root(), list(words)
    while hasattr(command, "commands"):
        if not rest or rest[0] not in command.commands:
            raise ValueError(f"no command: headway {' '.join(words)}")
        command = command.commands[rest.pop(0)]
    return command, rest


def check_command(words: list[str]) -> None:
    command, rest = resolve(words)
    with command.make_context("headway", rest) as context:
        given = {
            name: value
            for name, value in context.params.items()
            if name in SETTINGS and value not in (None, (), [])
        }
        if "config_file" in context.params:
            load_config(given, environ={})


def code_in_prose() -> Iterator[tuple[str, list[str]]]:
    """Words of every `headway ...` within a paragraph, with the place."""
    for path in documents():
        lines = prose_lines(path.read_text())
        for found in re.finditer(r"`headway ([^`]+)`", "\n".join(lines)):
            line = "\n".join(lines).count("\n", 0, found.start()) + 1
            yield f"{path.relative_to(ROOT)}:{line}", found[1].split()


def flags_of(command: Any) -> set[str]:
    options = [name for one in command.params for name in (*one.opts, *one.secondary_opts)]
    return {*options, "--help"}


def test_there_are_blocks_of_each_kind() -> None:
    tally = sort_blocks(BLOCKS)
    assert {block.language for block in BLOCKS} <= LANGUAGES
    assert len(tally.run) > 30
    assert all(len(block.not_run) > 10 for block in tally.skipped)


@pytest.mark.parametrize(
    "block", [one for one in BLOCKS if one.language == "python"], ids=lambda one: one.place
)
def test_python_compiles(block: CodeBlock) -> None:
    compile(block.text, block.place, "exec")


def test_every_command_is_parsed_by_the_command_line_itself() -> None:
    num_parsed = 0
    for block in BLOCKS:
        if block.language in SHELL:
            for words in headway_commands(block.text):
                try:
                    check_command(words)
                except Exception as error:
                    pytest.fail(f"{block.place}: headway {' '.join(words)}: {error!r}")
                num_parsed += 1
    assert num_parsed > 50


def test_flags_in_paragraphs_exist() -> None:
    for place, words in code_in_prose():
        if not re.fullmatch("[a-z]+", words[0]):
            continue
        command = root()
        rest = list(words)
        while rest and rest[0] in getattr(command, "commands", {}):
            command = command.commands[rest.pop(0)]
        assert command is not root(), f"{place}: headway {words[0]}"
        named = {word.partition("=")[0] for word in rest if re.match(r"--\w", word)}
        assert named <= flags_of(command), place


@pytest.mark.parametrize("words", [["serve"], ["serve", "m", "--portt", "1"], ["sing"]])
def test_a_wrong_command_is_found(words: list[str]) -> None:
    with pytest.raises(Exception, match=r"."):
        check_command(words)


def test_blocks_without_a_language_have_no_commands() -> None:
    for block in BLOCKS:
        if not block.language:
            assert not re.search(r"^(headway|curl|python|pip) ", block.text, re.M), block.place


def test_a_script_says_which_block_ended() -> None:
    blocks = [
        CodeBlock("a.md", 3, "json", "{}", file="x.json"),
        CodeBlock("a.md", 9, "python", 'print("path/to/model.gguf")\n'),
        CodeBlock("a.md", 20, "bash", "curl localhost:8000/v1/models\n"),
    ]
    script = script_of(blocks, "/m.gguf")
    assert 'print("/m.gguf")' in script
    assert script.index("> x.json") < script.index("@@ a.md:9'") < script.index("@@ a.md:20'")
    assert script.count("headway serve") == 1, "the page starts no server of its own"


def test_commands_are_found_in_a_script() -> None:
    script = (
        "headway a 'b\nc' \\\n  --d | cat  # headway x\ncat > f <<END\nheadway no\nEND\n"
        "true && headway e > out.txt & \nid=$(headway f)\n"
    )
    assert list(headway_commands(script)) == [["a", "b\nc", "--d"], ["e"], ["f"]]
