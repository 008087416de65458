"""Measures how long the masks of structured output take, for two sizes of vocabulary.

python -m benchmarks.live.mask_times MODEL.gguf [--schemas 100] [--vocab-size 150000] [--json FILE]

No model runs: tokens are drawn from the masks of random schemas, as a model would choose them. The
larger vocabulary is that of the model with pairs of its tokens that begin with a space or a letter.
Times are those of the thread, of one row, after the tokens before it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.schemas import random_schema
from headway.percentiles import percentile
from headway.text import Tokenizer
from headway.text.grammar import json_grammar
from headway.text.matchers import Matchers

MAX_TOKENS = 150


class WiderTokenizer(Tokenizer):
    """A tokenizer with more tokens, which are pairs of its own."""

    def widen(self, own_size: int, vocab_size: int) -> None:
        draw = random.Random("vocabulary")
        words = [
            text
            for text in (super(WiderTokenizer, self).token_bytes(one) for one in range(own_size))
            if text[:1].isalpha() or text[:1] == b" "
        ]
        pairs: dict[bytes, None] = {}
        while len(pairs) < vocab_size - own_size:
            pairs[draw.choice(words) + draw.choice(words)] = None
        self._own_size, self._pairs = own_size, list(pairs)

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < self._own_size:
            return super().token_bytes(token_id)
        return self._pairs[token_id - self._own_size]


def measure(tokenizer: Tokenizer, vocab_size: int, num_schemas: int) -> list[float]:
    """Return the seconds of each mask."""
    matchers = Matchers(lambda: tokenizer, vocab_size)
    matchers.prepare()
    mask = np.empty(-(-vocab_size // 32), dtype=np.int32)
    times: list[float] = []
    for seed in range(num_schemas):
        draw, matcher = random.Random(seed), matchers.matcher(json_grammar(random_schema(seed)))
        for _ in range(MAX_TOKENS):
            started_at = time.thread_time()
            matcher.write_mask(mask)
            times.append(time.thread_time() - started_at)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token_id = int(draw.choice(allowed))
            if token_id in tokenizer.eos_token_ids:
                break
            matcher.consume([token_id])
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--schemas", type=int, default=100)
    parser.add_argument("--vocab-size", type=int, default=150_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    own = Tokenizer.from_gguf(args.model)
    own_size = own.vocab_size
    wider = WiderTokenizer.from_gguf(args.model)
    assert isinstance(wider, WiderTokenizer)
    wider.widen(own_size, args.vocab_size)
    report: dict[str, Any] = {}
    for tokenizer, vocab_size in ((own, own_size), (wider, args.vocab_size)):
        times = measure(tokenizer, vocab_size, args.schemas)
        ranks = {f"p{rank}": percentile(times, rank) for rank in (50, 90, 99)}
        figures = {**ranks, "longest": max(times)}
        report[str(vocab_size)] = {"masks": len(times), **figures}
        text = ", ".join(f"{name} {1e6 * seconds:.0f}" for name, seconds in figures.items())
        print(f"{vocab_size} tokens, {len(times)} masks: {text} us")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
