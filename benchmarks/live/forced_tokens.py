"""Counts tokens that a grammar forces, and compares them with what greedy decoding chooses.

python -m benchmarks.live.forced_tokens MODEL [--schemas 200] [--json FILE]

Every schema gives one greedy output under the masks of Headway. The output is then replayed:

single   tokens at which the mask allows one token only, the end of the output not counted
chained  those of them that follow another: known before the model has run
forced   tokens that llguidance would append without the model, with its option `no_forcing` off:
         the canonical tokens of the text that must follow
changed  of the texts that must follow, those for which greedy decoding chose other tokens
differ   outputs whose text is another one if forced tokens are taken
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher

from benchmarks.support.schemas import random_schema
from headway import LLM, CompletionOutput, SamplingParams
from headway.text.grammar import HEADER, json_grammar
from headway.text.matchers import read_tokens

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_TOKENS = 100
NUM_PERSONS = 20
PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 20},
        "date_of_birth": {"type": "string", "format": "date"},
        "email_address": {"type": "string", "maxLength": 30},
        "is_subscribed": {"type": "boolean"},
        "favourite_colour": {"enum": ["red", "green", "blue"]},
    },
    "required": [
        "first_name",
        "date_of_birth",
        "email_address",
        "is_subscribed",
        "favourite_colour",
    ],
    "additionalProperties": False,
}


def replay(tokens: LLTokenizer, grammar: str, output_ids: Sequence[int]) -> Counter[str]:
    """Return what the grammar forced along an output."""
    counts: Counter[str] = Counter(outputs=1, tokens=len(output_ids))
    free = LLMatcher(tokens, grammar, log_level=0)
    forcing = LLMatcher(tokens, grammar.removeprefix(HEADER), log_level=0)
    forced_until, was_single = 0, False
    for place, token_id in enumerate(output_ids):
        mask = np.frombuffer(free.compute_bitmask(), np.uint8)
        is_single = int(np.unpackbits(mask).sum()) == 1 and not tokens.is_special_token(token_id)
        counts["single"] += is_single
        counts["chained"] += is_single and was_single
        was_single = is_single
        if place >= forced_until and (forced := forcing.compute_ff_tokens()):
            forced_until = place + len(forced)
            chosen = list(output_ids[place:forced_until])
            counts["forced"] += len(chosen)
            counts["texts"] += 1
            counts["changed"] += chosen != forced[: len(chosen)]
        free.consume_token(token_id)
        forcing.consume_token(token_id)
    return counts


def measure(llm: LLM, grammars: Sequence[str]) -> Counter[str]:
    """Return the counts over one output of each grammar."""
    tokens = read_tokens(llm.tokenizer, llm.info.vocab_size)
    free = generate(llm, grammars)
    # Without the option, the mask allows the first forced token only.
    forced = generate(llm, [grammar.removeprefix(HEADER) for grammar in grammars])
    counts: Counter[str] = Counter()
    for grammar, output, other in zip(grammars, free, forced, strict=True):
        counts += replay(tokens, grammar, output.token_ids)
        shorter, longer = sorted((output.text, other.text), key=len)
        counts["differ"] += not longer.startswith(shorter)  # either may be cut by max_tokens
    return counts


def generate(llm: LLM, grammars: Sequence[str]) -> list[CompletionOutput]:
    """Return one greedy output of each grammar."""
    prompts = [f"JSON number {at} of a list: " for at in range(len(grammars))]
    params = [
        SamplingParams(grammar=grammar, temperature=0.0, max_tokens=MAX_TOKENS)
        for grammar in grammars
    ]
    return [output.outputs[0] for output in llm.generate(prompts, params)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kinds = {
        "random schemas": [json_grammar(random_schema(seed)) for seed in range(args.schemas)],
        "person": [json_grammar(PERSON)] * NUM_PERSONS,
        "person, compact": [json_grammar(PERSON, is_compact=True)] * NUM_PERSONS,
    }
    llm = LLM(args.model, max_num_seqs=64, kv_cache_memory_bytes="128M")
    report: dict[str, Any] = {}
    for kind, grammars in kinds.items():
        found = measure(llm, grammars)
        report[kind] = dict(found)
        print(
            f"{kind}: {found['tokens']} tokens, single {found['single'] / found['tokens']:.1%}, "
            f"chained {found['chained'] / found['tokens']:.1%}, "
            f"forced {found['forced'] / found['tokens']:.1%}; greedy chose other tokens for "
            f"{found['changed']} of {found['texts']} texts; with forced tokens "
            f"{found['differ']} of {found['outputs']} outputs have another text"
        )
    llm.close()
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
