"""The requests of a ledger as a load: a coarse one, for who has no recording.

A ledger has lengths and times, and no tokens. It says how many prompt tokens of a request were
cached, and not with whom they were shared. So these tokens are the start of a prefix that its
tenant has for itself, and the rest of the prompt is shared with nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from math import isfinite

from headway.core.executor import Capacity
from headway.core.params import MAX_SAMPLES
from headway.core.running.admission import max_tokens_for
from headway.core.terms import Targets, Terms
from headway.errors import NeverFitsError
from headway.observe.ledger.store import UnreadableRow
from headway.observe.trace.account import RequestAccount
from headway.observe.trace.names import prompt_name
from headway.sim.recording.items import RecordedItem
from headway.sim.recording.load import FIRST_TOKEN
from headway.workload import Listed

MAX_TOKENS = 10**7
"""A request with more tokens than any context has is none that a server wrote."""
MAX_PARTS = 10**4
"""The same of prompts and samples."""
MAX_PRIORITY = 2**63 - 1
MAX_TERM = 1e6
"""Largest weight, or target in seconds."""


@dataclass(slots=True)
class AccountCounts:
    """How many requests became what."""

    num_requests: int = 0
    """HTTP requests in the load."""
    num_left_out: int = 0
    """Requests that ended without an output token."""
    num_unreadable: int = 0
    """Rows that cannot be decoded, or say what no server would have written."""
    num_divided: int = 0
    """Requests with several prompts or samples; each of these is one in the load."""
    num_even: int = 0
    """Divided requests whose account does not say which part had how many tokens."""
    num_old: int = 0
    """Requests of a release that did not write max_tokens, priority and terms."""


@dataclass(frozen=True, slots=True)
class AccountLoad:
    """The requests of a ledger, and what they were made of."""

    workload: Listed
    counts: AccountCounts


@dataclass(frozen=True, slots=True)
class _AccountPart:
    """One sample of one prompt; samples of a prompt have the same `prompt`."""

    prompt: str
    at_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


def load_of_accounts(
    accounts: Iterable[RequestAccount | UnreadableRow], capacity: Capacity
) -> AccountLoad:
    """Return the requests of a ledger for engines of a capacity; each sample of a prompt is one."""
    maker = _ItemMaker(capacity)
    for account in accounts:
        maker.add(account)
    items = sorted(maker.items, key=lambda one: one.at)
    began_at = items[0].at if items else 0.0
    numbered = (
        replace(item, at=item.at - began_at, number=number) for number, item in enumerate(items)
    )
    return AccountLoad(Listed(tuple(numbered)), maker.counts)


@dataclass(slots=True)
class _ItemMaker:
    """Makes items of accounts; their arrivals are wall-clock times."""

    capacity: Capacity
    items: list[RecordedItem] = field(default_factory=list[RecordedItem])
    counts: AccountCounts = field(default_factory=AccountCounts)
    _tokens: Iterator[int] = field(default_factory=lambda: count(FIRST_TOKEN))
    _prefixes: dict[str, int] = field(default_factory=dict[str, int])
    """The token that the prefix of a tenant repeats."""

    def add(self, account: RequestAccount | UnreadableRow) -> None:
        """Add the samples of a request, and count it."""
        counts = self.counts
        if isinstance(account, UnreadableRow) or not _is_possible(account):
            counts.num_unreadable += 1
            return
        if not account.num_output_tokens:
            counts.num_left_out += 1
            return
        is_divided = account.num_parts > 1
        parts = _parts_in_timeline(account) if is_divided else []
        counts.num_requests += 1
        counts.num_divided += is_divided
        counts.num_even += is_divided and not parts
        counts.num_old += not account.max_tokens
        parts = parts or _even_parts(account)
        self._add_parts(account, [one for one in parts if one.num_output_tokens])

    def _add_parts(self, account: RequestAccount, parts: Iterable[_AccountPart]) -> None:
        terms = _terms_of(account)
        if account.tenant not in self._prefixes:
            self._prefixes[account.tenant] = next(self._tokens)
        prefix = self._prefixes[account.tenant]
        rests: dict[str, int] = {}
        for part in parts:
            if part.prompt not in rests:
                rests[part.prompt] = next(self._tokens)
            num_cached = min(part.num_cached_tokens, part.num_prompt_tokens)
            num_new = part.num_prompt_tokens - num_cached
            self.items.append(
                RecordedItem(
                    (prefix,) * num_cached + (rests[part.prompt],) * num_new,
                    part.num_output_tokens,
                    account.arrived_at + part.at_s,
                    account.tenant or None,
                    (next(self._tokens),) * part.num_output_tokens,
                    self._max_tokens_of(account, part),
                    terms,
                    account.priority,
                )
            )

    def _max_tokens_of(self, account: RequestAccount, part: _AccountPart) -> int:
        """Return the longest output that was allowed, and fits: by default all of a context."""
        try:
            room = max_tokens_for(part.num_prompt_tokens, self.capacity, account.max_kv_share)
        except NeverFitsError:
            room = 0  # the simulated engine refuses the request
        return max(part.num_output_tokens, min(account.max_tokens, room))


def _terms_of(account: RequestAccount) -> Terms:
    return Terms(
        tenant=account.tenant,
        tier=account.tier,
        weight=account.weight,
        is_spot=account.is_spot,
        max_kv_share=account.max_kv_share,
        cache_group=account.tenant,
        targets=Targets(account.target_ttft_s, account.target_tpot_s, account.deadline_s),
    )


def _is_possible(account: RequestAccount) -> bool:
    """Return whether a server could have written this; other programs can write to a database."""
    counts = (
        account.num_prompt_tokens,
        account.num_cached_tokens,
        account.num_output_tokens,
        account.max_tokens,
    )
    targets = (account.target_ttft_s, account.target_tpot_s, account.deadline_s)
    return (
        all(0 <= one <= MAX_TOKENS for one in counts)
        and account.num_prompt_tokens >= max(1, account.num_cached_tokens)
        and 1 <= account.n <= MAX_SAMPLES
        and 1 <= account.num_parts <= MAX_PARTS
        and abs(account.priority) <= MAX_PRIORITY
        and isfinite(account.arrived_at)
        and 0.0 < account.weight <= MAX_TERM
        and 0.0 < account.max_kv_share <= 1.0
        and all(one is None or 0.0 < one <= MAX_TERM for one in targets)
        and account.tenant.isprintable()
        and account.tier.isprintable()
    )


def _parts_in_timeline(account: RequestAccount) -> list[_AccountPart]:
    """Return the parts as the timeline shows them; empty if it does not show them all."""
    arrivals: dict[str, tuple[float, int]] = {}
    cached: dict[str, int] = {}
    outputs: dict[str, int] = {}
    for entry in account.timeline:
        if entry.kind == "arrived":
            arrivals[entry.part] = entry.at_s, entry.num_tokens
        elif entry.kind == "admitted":
            cached.setdefault(entry.part, entry.num_tokens)
        elif entry.kind == "finished":
            outputs[entry.part] = entry.num_tokens
    names = {part: prompt_name(part) for part in outputs}
    is_complete = (
        len(outputs) == account.num_parts
        and arrivals.keys() == set(names.values())
        and all(at_s >= 0.0 and number > 0 for at_s, number in arrivals.values())
        and all(number >= 0 for number in (*cached.values(), *outputs.values()))
        and sum(number for _, number in arrivals.values()) == account.num_prompt_tokens
        and sum(outputs.values()) == account.num_output_tokens
    )
    if not is_complete:
        return []
    return [
        _AccountPart(prompt, *arrivals[prompt], cached.get(prompt, 0), outputs[part])
        for part, prompt in names.items()
    ]


def _even_parts(account: RequestAccount) -> list[_AccountPart]:
    """Return equal parts of a request; tokens that are left over are those of the first."""
    num_parts, n = account.num_parts, account.n
    num_prompts = -(-num_parts // n)
    num_output, num_over = divmod(account.num_output_tokens, num_parts)
    return [
        _AccountPart(
            str(number // n),
            0.0,
            max(1, account.num_prompt_tokens // num_prompts),
            account.num_cached_tokens // num_prompts,
            num_output + (number < num_over),
        )
        for number in range(num_parts)
    ]
