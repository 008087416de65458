"""Measures what a grammar costs: decode steps with a JSON schema against greedy steps without.

python -m benchmarks.live.grammars MODEL [--streams 32] [--rounds 5] [--json FILE]

Each round generates with and without the schema, in turn. Every stream has the same number of
tokens: the schema is an array without an end. A figure is the rate with the schema over the rate
without, as median and range over the rounds. Masks are computed while the model runs.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

from headway import LLM, SamplingParams
from headway.bench.steal import StealMeter, steal_plain, steal_text
from headway.text.grammar import json_grammar

NUM_TOKENS = 96
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "minItems": 9999,
}


def rate(llm: LLM, params: SamplingParams, num_streams: int) -> float:
    """Return output tokens per second after the first token of all streams."""
    prompts = [f"Person number {at} of a list, as JSON: " for at in range(num_streams)]
    started_at = time.perf_counter()
    outputs = llm.generate(prompts, params)
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    if num_tokens != num_streams * NUM_TOKENS:
        raise SystemExit(f"error: {num_tokens} tokens, not {NUM_TOKENS} for each stream")
    return num_tokens / (time.perf_counter() - started_at)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    llm = LLM(args.model, max_num_seqs=args.streams, kv_cache_memory_bytes="512M")
    plain = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    guided = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, grammar=json_grammar(SCHEMA))
    rate(llm, guided, args.streams)
    meter = StealMeter()
    rounds: list[dict[str, Any]] = []
    for _ in range(args.rounds):
        found = {"plain": rate(llm, plain, args.streams), "guided": rate(llm, guided, args.streams)}
        rounds.append(found)
    llm.close()
    ratios = [one["guided"] / one["plain"] for one in rounds]
    steal = meter.read()
    print(
        f"{args.streams} streams: {median(one['plain'] for one in rounds):.0f} tokens/s, with a "
        f"schema {median(one['guided'] for one in rounds):.0f}: {median(ratios):.3f} "
        f"({min(ratios):.3f} - {max(ratios):.3f}, {len(rounds)} rounds), {steal_text(steal)}"
    )
    if args.json:
        report = {"streams": args.streams, "rounds": rounds, "steal": steal_plain(steal)}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
