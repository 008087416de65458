"""`headway --version` and `headway --help`, without imports that take long."""

from __future__ import annotations

from collections.abc import Sequence

from headway._version import __version__

ABOUT = "A continuous-batching LLM inference server."
SUMMARIES = {
    "serve": "Serve a model over HTTP with the OpenAI API.",
    "engine": "Run an engine that waits for frontends.",
    "frontend": "Serve the OpenAI API over engines on the network.",
    "router": "Decide for several frontends which engine gets a request.",
    "fleet": "Run many engines and frontends from one file.",
    "chat": "Chat with a model.",
    "doctor": "Show the hardware: cores, instruction sets, torch, memory, KV cache.",
    "top": "Show live what requests wait for and what the engines do.",
    "explain": "Explain a request: a paragraph and a timeline.",
    "trace": "Write recent steps and requests as a trace that Perfetto opens.",
    "replay": "Replay recordings of engines and routers, and compare every decision.",
    "usage": "Sum usage and cost of requests.",
    "batch": "Run files of requests on a server's spare capacity.",
    "bench": "Measure throughput and latency.",
    "profile": "Measure what steps and requests take on this machine with a model.",
    "simulate": "Predict what clients of a server or fleet would see.",
    "plan": "Say how many engines a load needs within targets.",
    "cache": "List or delete packed weights, which speed up starts.",
    "keys": "Create keys for --api-keys-file and --cluster-key-file.",
    "tenants": "Edit the file for --tenants-file.",
}
"""First line of the help of each subcommand; importing all of them takes a second."""


def answer(arguments: Sequence[str]) -> str | None:
    """Return the text that the arguments ask for; None if they ask for something else."""
    if list(arguments) == ["--version"]:
        return f"headway {__version__}"
    if list(arguments) == ["--help"]:
        return _help()
    return None


def _help() -> str:
    options = {
        "--version": "Print the version.",
        "--install-completion": "Install completion for this shell.",
        "--show-completion": "Print the completion for this shell.",
        "--help": "Show this message and exit.",
    }
    sections = (("Options", options), ("Commands", SUMMARIES))
    lines = ["Usage: headway [OPTIONS] COMMAND [ARGS]...", "", f"  {ABOUT}"]
    for title, entries in sections:
        width = max(map(len, entries))
        lines += ["", f"{title}:", *(f"  {name:{width}}  {entries[name]}" for name in entries)]
    return "\n".join([*lines, "", "Options of a command: headway COMMAND --help"])
