"""From what a caller asks for to a request the core can take: checked, resolved, seeded."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from headway.core.params import SamplingParams
from headway.core.running.admission import PeakDemand, max_tokens_for, refuse_if_never_fits
from headway.engine.process.messages import EngineInfo
from headway.errors import InvalidRequestError, NeverFitsError


def check_prompt(token_ids: Sequence[int], info: EngineInfo) -> None:
    """A prompt is not empty and names only tokens that exist."""
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
    """Params with nothing left open, for this prompt on this engine and with the share of the
    KV blocks its tenant may hold; or the refusal, raised.

    A max_tokens that was asked for and does not fit is refused, not shortened.
    """
    # The length first: it costs nothing, and bounds what the other checks cost.
    room = max_tokens_for(len(token_ids), info.capacity, max_kv_share)
    check_prompt(token_ids, info)
    _check_token_ids(params, info.vocab_size)
    requested = room if params.max_tokens is None else params.max_tokens
    demand = PeakDemand(len(token_ids), requested, params.n, max_kv_share)
    refusal = refuse_if_never_fits(demand, info.capacity, info.max_num_seqs)
    if refusal is not None:
        raise NeverFitsError(refusal.message, refusal.param)
    return params.resolved(eos_token_ids, room)


def _check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    for name, ids in (
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
    ):
        if ids and max(ids) >= vocab_size:
            raise InvalidRequestError(f"{name} names tokens outside 0..{vocab_size - 1}", name)


def draw_seed(params: SamplingParams) -> int:
    """The request's seed: the caller's, or a fresh one that is then kept for its whole life."""
    return params.seed if params.seed is not None else secrets.randbits(63)
