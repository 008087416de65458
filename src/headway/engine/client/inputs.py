"""Checks a prompt and resolves its sampling parameters."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from headway.core.params import SamplingParams
from headway.core.running.admission import PeakDemand, max_tokens_for, refuse_if_never_fits
from headway.engine.process.messages import EngineInfo
from headway.errors import InvalidRequestError, NeverFitsError
from headway.text import Tokenizer


def check_prompt(token_ids: Sequence[int], info: EngineInfo) -> None:
    """Raise InvalidRequestError if a prompt is empty or has unknown token ids."""
    if not token_ids:
        raise InvalidRequestError("the prompt is empty", "prompt")
    if min(token_ids) < 0 or max(token_ids) >= info.vocab_size:
        raise InvalidRequestError(
            f"the prompt has token ids outside 0..{info.vocab_size - 1}", "prompt"
        )


def resolve_params(
    params: SamplingParams,
    token_ids: Sequence[int],
    info: EngineInfo,
    eos_token_ids: tuple[int, ...],
    max_kv_share: float = 1.0,
) -> SamplingParams:
    """Return params with every value set, or raise the refusal.

    `max_kv_share` is the part of the KV blocks that the tenant may hold. A max_tokens that does
    not fit is refused, not shortened.
    """
    # The length first: it is cheap to check, and it bounds the cost of the other checks.
    room = max_tokens_for(len(token_ids), info.capacity, max_kv_share)
    check_prompt(token_ids, info)
    check_token_ids(params, info.vocab_size)
    requested = room if params.max_tokens is None else params.max_tokens
    demand = PeakDemand(len(token_ids), requested, params.n, max_kv_share)
    refusal = refuse_if_never_fits(demand, info.capacity, info.max_num_seqs)
    if refusal is not None:
        raise NeverFitsError(refusal.message, refusal.param)
    return params.resolved(eos_token_ids, room)


def with_bad_words(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Return params with their bad words as tokens, as vLLM does.

    A word is forbidden at the start of a text, and after a space if that makes it another sequence
    of as many tokens.
    """
    sequences: list[tuple[int, ...]] = []
    for word in params.bad_words:
        plain = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False))
        if plain:
            sequences.append(plain)
        if spaced and len(spaced) == len(plain) and spaced[0] != plain[0]:
            sequences.append(spaced)
        if not plain:
            raise InvalidRequestError(f"bad_words: {word!r} has no tokens", "bad_words")
    return replace(params, bad_words_token_ids=tuple(sequences)) if sequences else params


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequestError if params name unknown token ids."""
    for name, ids in (
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids),
        ("bad_words", [max(ids) for ids in params.bad_words_token_ids]),
    ):
        if ids and max(ids) >= vocab_size:
            raise InvalidRequestError(f"{name} names tokens outside 0..{vocab_size - 1}", name)


def draw_seed(params: SamplingParams) -> int:
    """Return the caller's seed, or a random seed for the request's whole life."""
    return params.seed if params.seed is not None else secrets.randbits(63)
