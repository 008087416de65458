"""Checks what one side says before the other side relies on it.

A frontend has checked its requests already. But a frontend may be of another release, broken or
taken over, and its requests must not end those of others. The same holds for the facts of engines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import isfinite

from headway.core.params import MAX_LOGPROBS, MAX_SAMPLES
from headway.core.plan import TokenLogprobs
from headway.core.request import sample_id
from headway.core.terms import Terms
from headway.engine.client.inputs import check_prompt, check_token_ids
from headway.engine.process.messages import AddRequest, EngineInfo, Handover, SampleRecord
from headway.errors import InvalidRequestError
from headway.fleet.network.wire import Credit

MAX_NAME_CHARS = 256
MAX_FRONTEND_CHARS = 100
"""Of the name of a frontend in logs."""
MAX_NOTE_BYTES = 4096
MAX_WEIGHT = 1e6
_MAX_INT = 2**31
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_SEED_LIMIT = 2**63


def loggable_name(given: str) -> str:
    """Return the name that a frontend gives itself, fit for a log."""
    return "".join(one for one in given if one.isprintable())[:MAX_FRONTEND_CHARS]


def refuse_version(peer: str, own: int, given: int) -> str:
    """Return why a frontend of another protocol version is refused; empty if it is not."""
    if given == own:
        return ""
    return (
        f"the {peer} speaks version {own} of the protocol, the frontend version {given}; run the "
        "same release of Headway on both"
    )


def check_request(command: AddRequest, info: EngineInfo) -> None:
    """Raise InvalidRequestError if an engine must not get this request."""
    _check(len(command.token_ids) <= info.capacity.max_model_len, "token_ids is too long")
    check_prompt(command.token_ids, info)
    check_token_ids(command.params, info.vocab_size)
    _check(command.params.max_tokens is not None, "max_tokens is not resolved")
    num_prompt = command.num_prompt_tokens or len(command.token_ids)
    _check(1 <= command.num_scored <= num_prompt, "num_scored is out of range")
    _check(-_SEED_LIMIT <= command.seed < _SEED_LIMIT, "seed is out of range")
    _check(abs(command.priority) < _MAX_INT, "priority is out of range")
    _check(0 <= command.attempt < _MAX_INT, "attempt is out of range")
    _check(0 <= command.num_crashes < _MAX_INT, "num_crashes is out of range")
    _check_time(command.arrived_at, "arrived_at")
    _check_time(command.waited_s or 0.0, "waited_s")
    _check((command.waited_s or 0.0) >= 0.0, "waited_s is negative")
    _check_sample(command)
    check_terms(command.terms)
    _check(len(command.note) <= MAX_NOTE_BYTES, "note is too long")
    _check(not command.alias or _is_id(command.alias), "alias is not valid")
    if command.past is not None:
        _check_past(command, info)


def check_handover(handover: Handover, info: EngineInfo) -> None:
    """Raise InvalidRequestError if a frontend must not continue a request that it was handed."""
    command = handover.command
    if command is None:
        return
    check_request(command, info)
    is_asked_for = handover.request_id in (command.id, command.alias)
    is_whole = is_asked_for and "#" not in command.id and not command.index
    _check(is_whole and not command.num_prompt_tokens, "it is not a whole request")
    num_cached = handover.num_cached_tokens or 0
    _check(0 <= num_cached <= len(command.token_ids), "num_cached_tokens is out of range")
    _check_records(handover.samples, command, command.params.n, info)


def check_name(name: str) -> None:
    """Raise InvalidRequestError if a text is too long for the name of a tenant or an engine."""
    _check(len(name) <= MAX_NAME_CHARS, "a name is too long")


def check_engine(info: EngineInfo, credit: Credit) -> str:
    """Return what is wrong with the facts of an engine; empty if they can be used."""
    capacity = info.capacity
    facts = {
        "num_blocks": capacity.num_blocks,
        "block_size": capacity.block_size,
        "max_model_len": capacity.max_model_len,
        "max_num_seqs": info.max_num_seqs,
        "vocab_size": info.vocab_size,
        "credit.num_requests": credit.num_requests,
        "credit.num_tokens": credit.num_tokens,
    }
    wrong = [f"{name} {number}" for name, number in facts.items() if not 0 < number < _MAX_INT]
    return f"its facts are impossible: {', '.join(wrong)}" if wrong else ""


def check_id(name: str) -> None:
    """Raise InvalidRequestError if a text is not the id of a sample."""
    request_id, _, index = name.partition("#")
    is_index = index.isascii() and index.isdecimal() and len(index) <= 3
    _check(_is_id(request_id) and (is_index or "#" not in name), "id is not valid")


def _is_id(name: str) -> bool:
    return _REQUEST_ID.fullmatch(name) is not None


def _check_sample(command: AddRequest) -> None:
    check_id(command.id)
    _check(0 <= command.index < MAX_SAMPLES, "index is out of range")
    _check(sample_id(command.id.partition("#")[0], command.index) == command.id, "id and index")
    num_output = len(command.token_ids) - command.num_prompt_tokens
    if command.num_prompt_tokens or command.index:
        is_valid = 0 < command.num_prompt_tokens <= len(command.token_ids)
        _check(is_valid and command.params.n == 1, "num_prompt_tokens is out of range")
        _check(num_output < (command.params.max_tokens or 0), "the output is complete")


def _check_past(command: AddRequest, info: EngineInfo) -> None:
    past = command.past
    if past is None or not command.num_prompt_tokens:
        raise InvalidRequestError("past is for requests with output")
    _check(0 < past.num_samples <= MAX_SAMPLES, "num_samples is out of range")
    num_cached = past.num_cached_tokens or 0
    _check(0 <= num_cached <= command.num_prompt_tokens, "num_cached_tokens is out of range")
    _check_records(past.samples, command, past.num_samples, info)
    own = [one.token_ids for one in past.samples if one.index == command.index]
    _check(own == [command.token_ids[command.num_prompt_tokens :]], "past is of another sample")


def _check_records(
    records: Sequence[SampleRecord], command: AddRequest, num_samples: int, info: EngineInfo
) -> None:
    indices = [one.index for one in records]
    is_valid = len(set(indices)) == len(indices) and all(0 <= one < num_samples for one in indices)
    _check(is_valid, "index of a record")
    for one in records:
        num_tokens = len(one.token_ids)
        _check(num_tokens <= (command.params.max_tokens or 0), "a record is too long")
        if one.token_ids:
            check_prompt(one.token_ids, info)
        has_scores = command.params.logprobs is not None and num_tokens > 0
        _check((one.logprobs is not None) == has_scores, "log-probabilities of a record")
        _check(len(one.logprobs or ()) in (0, num_tokens), "log-probabilities of a record")
        for scores in one.logprobs or ():
            _check_scores(scores, info)


def _check_scores(scores: TokenLogprobs, info: EngineInfo) -> None:
    num_top = len(scores.top_ids)
    _check(num_top == len(scores.top_logprobs) and num_top <= MAX_LOGPROBS, "top_ids of a record")
    _check(all(0 <= one < info.vocab_size for one in scores.top_ids), "top_ids of a record")


def check_terms(terms: Terms) -> None:
    """Raise InvalidRequestError if the terms of a request are not those of a tenant."""
    _check(0.0 < terms.weight <= MAX_WEIGHT, "weight is out of range")
    _check(0.0 < terms.max_kv_share <= 1.0, "max_kv_share is out of range")
    for name in (terms.tenant, terms.tier, terms.cache_group, terms.cache_salt):
        _check(len(name) <= MAX_NAME_CHARS, "a name in the terms is too long")
    targets = terms.targets
    for target in (targets.ttft_s, targets.tpot_s, targets.deadline_s):
        _check(target is None or 0.0 < target < _MAX_INT, "a target is out of range")


def _check_time(at: float, name: str) -> None:
    _check(isfinite(at), f"{name} is not a time")


def _check(is_valid: bool, message: str) -> None:
    if not is_valid:
        raise InvalidRequestError(message)
