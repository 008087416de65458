"""`headway chat`: chat with a model in the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from headway.build import build_offline
from headway.cli.options import with_settings
from headway.cli.progress import progress_bar
from headway.config import Config
from headway.core.params import SamplingParams
from headway.engine.offline import OfflineEngine
from headway.errors import InvalidRequestError


@with_settings("model", "cache", "scheduler")
def chat(
    config: Config,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="Send this prompt, print the response, exit.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", help="Most output tokens of a response.")
    ] = 512,
    temperature: Annotated[
        float, typer.Option("--temperature", help="Sampling temperature; 0 is greedy.")
    ] = 0.0,
) -> None:
    """Chat with a model.

    Without --prompt it is a conversation; /reset starts over, Ctrl-D ends.
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    with progress_bar("loading weights") as progress:
        llm = OfflineEngine(build_offline(config, progress))
    history = [] if system is None else [{"role": "system", "content": system}]
    try:
        if prompt is not None:
            _answer(llm, [*history, {"role": "user", "content": prompt}], params)
        else:
            _converse(llm, history, params)
    finally:
        llm.close()


def _converse(llm: OfflineEngine, start: list[dict[str, str]], params: SamplingParams) -> None:
    console = Console(stderr=True)
    console.print("[dim]/reset starts over, Ctrl-D ends[/dim]")
    history = list(start)
    while True:
        try:
            text = console.input("[bold green]you[/bold green] ").strip()
        except EOFError:
            return
        if text == "/reset":
            history = list(start)
            console.print("[dim]started over[/dim]")
            continue
        if not text:
            continue
        history.append({"role": "user", "content": text})
        try:
            answer = _answer(llm, history, params)
        except InvalidRequestError as error:
            console.print(f"[red]{error}[/red]; /reset starts over")
            history.pop()
            continue
        except KeyboardInterrupt:  # stops the response, not the conversation
            console.print("\n[dim]stopped[/dim]")
            history.pop()
            continue
        history.append({"role": "assistant", "content": answer})


def _answer(llm: OfflineEngine, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Print the response as it is generated, and return it."""
    printed = ""
    for text in llm.stream_chat(messages, params):
        sys.stdout.write(text)
        sys.stdout.flush()
        printed += text
    sys.stdout.write("\n")
    sys.stdout.flush()
    return printed
