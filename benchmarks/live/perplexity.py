"""Computes the perplexity of a model on a fixed text, for the quality tests.

The text is cut into consecutive windows. Each window is a separate context from position 0 on. A
window is prefilled in chunks, so that every chunk after the first reads earlier keys and values
from the KV store, and the loss of the store's data type shows in the result. Each position of a
window is scored by the next token of the text, so every token but the first is scored once, for
windows of any size.

Windows begin with the BOS token only if the tokenizer itself adds one to plain text. SmolLM2 names
`<|im_start|>` as its BOS, but that opens a chat turn and its tokenizer never adds it: no BOS.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from headway.executors.step_model import HasLogits, Span
from headway.text import Tokenizer

TEXT = Path(__file__).parent / "data" / "alice.txt"
WINDOW = 512
CHUNK = 128
BLOCK_SIZE = 16
NUM_TOGETHER = 4
"""Windows per step, as requests of a batch: about 30 % faster than one by one."""
NUM_BLOCKS = NUM_TOGETHER * WINDOW // BLOCK_SIZE
"""Blocks of BLOCK_SIZE that windows of WINDOW need."""


@dataclass(frozen=True, slots=True)
class Quality:
    """Result of one model on one text."""

    nll: float
    """Mean negative log likelihood of a scored token, in nats."""
    greedy_ids: tuple[int, ...]
    """Likeliest token at each scored position given the text before, in a fixed order."""

    @property
    def num_scored(self) -> int:
        return len(self.greedy_ids)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)

    def ratio_to(self, reference: Quality) -> float:
        """Return the perplexity over the reference's; above 1 is worse."""
        return math.exp(self.nll - reference.nll)

    def share_same_greedy(self, reference: Quality) -> float:
        """Return the share of positions where both choose the same token."""
        pairs = zip(self.greedy_ids, reference.greedy_ids, strict=True)
        return sum(ours == theirs for ours, theirs in pairs) / self.num_scored


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens to score, and the BOS token that every window begins with, if any."""

    token_ids: Sequence[int]
    bos_token_id: int | None = None


def read_text(tokenizer: Tokenizer, max_tokens: int | None = None) -> Text:
    """Return the fixed text, or its first `max_tokens` tokens."""
    token_ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)
    adds_bos = tokenizer.bos_token_id in tokenizer.encode("", add_special_tokens=True)
    return Text(token_ids[:max_tokens], tokenizer.bos_token_id if adds_bos else None)


@dataclass(frozen=True, slots=True)
class _Window:
    """Input tokens of one context, and the next tokens as targets."""

    inputs: Sequence[int]
    targets: Sequence[int]


@torch.inference_mode()
def perplexity(
    model: HasLogits,
    token_ids: Sequence[int],
    window: int = WINDOW,
    bos_token_id: int | None = None,
) -> Quality:
    """Score every token of the text; without a BOS token, all but the first."""
    windows = list(_windows(token_ids, window, bos_token_id))
    nlls: list[float] = []
    greedy_ids: list[int] = []
    for first in range(0, len(windows), NUM_TOGETHER):
        together = windows[first : first + NUM_TOGETHER]
        for start in range(0, window, CHUNK):
            spans = list(_spans(together, start, -(-window // BLOCK_SIZE)))
            targets = [token for one in together for token in one.targets[start : start + CHUNK]]
            if targets:
                logits = torch.from_numpy(model.logits(spans, range(len(targets))))
                nlls += _nlls(logits, targets)
                greedy_ids += logits.argmax(dim=-1).tolist()
    return Quality(math.fsum(nlls) / len(nlls), tuple(greedy_ids))


def _windows(token_ids: Sequence[int], window: int, bos_token_id: int | None) -> Iterator[_Window]:
    prefix = [] if bos_token_id is None else [bos_token_id]
    stream = [*prefix, *token_ids]
    for first in range(0, len(stream) - 1, window):
        targets = stream[first + 1 : first + 1 + window]
        inputs = stream[first : first + len(targets)]
        inputs[: len(prefix)] = prefix
        yield _Window(inputs, targets)


def _spans(together: Sequence[_Window], start: int, num_blocks: int) -> Iterator[Span]:
    """Yield the chunk from `start` on of each long enough window, in its own blocks."""
    for place, one in enumerate(together):
        if chunk := one.inputs[start : start + CHUNK]:
            yield Span(chunk, start, range(place * num_blocks, (place + 1) * num_blocks))


def _nlls(logits: torch.Tensor, targets: Sequence[int]) -> list[float]:
    """Return the negative log likelihood of each row's target.

    A row is summed in float32, which is accurate to 2e-6 and four times as fast as float64. The
    mean over the rows is taken in float64.
    """
    # Some models return bf16, which is too coarse to sum over a vocabulary.
    logits = logits.float()
    target_ids = torch.tensor(targets, device=logits.device)[:, None]
    chosen = logits.gather(1, target_ids)[:, 0].double()
    nlls = logits.logsumexp(dim=-1).double() - chosen
    if not nlls.isfinite().all():
        raise ValueError("the logits contain NaN or infinity")
    return nlls.tolist()
