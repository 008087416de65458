"""Contents of requests: tenants, token ids and shared prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random

from headway.errors import ConfigError
from headway.workload.spec import Form, check_whole, parse_parts

DEFAULT_ZIPF = 1.2


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Range of token ids of prompts: `low` up to, without, `high`.

    The default skips the special tokens at the start of most vocabularies and fits the common ones.
    """

    low: int = 100
    high: int = 20_000

    def __post_init__(self) -> None:
        check_whole(0, low=self.low, high=self.high)
        if self.low >= self.high:
            raise ConfigError(f"the lower token id {self.low} must be below {self.high}")

    def token_ids(self, draw: Random, num_tokens: int) -> list[int]:
        return draw.choices(range(self.low, self.high), k=num_tokens)


@dataclass(frozen=True, slots=True)
class Tenants:
    """A number of tenants; tenant k has weight k to the power of -zipf."""

    num: int = 1
    zipf: float = DEFAULT_ZIPF

    def __post_init__(self) -> None:
        check_whole(1, tenants=self.num)
        if self.zipf < 0:
            raise ConfigError(f"zipf must be at least 0, not {self.zipf:g}")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"tenant-{number}" for number in range(1, self.num + 1))

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of the requests per tenant, largest first."""
        weights = [number**-self.zipf for number in range(1, self.num + 1)]
        return tuple(weight / sum(weights) for weight in weights)


@dataclass(frozen=True, slots=True)
class Prefixes:
    """A `share` of the prompts starts with one of `num` prefixes of the tenant.

    The prefix counts in the prompt length; a prompt too short for its prefix becomes one token
    longer than the prefix.
    """

    share: float = 0.0
    num: int = 1
    num_tokens: int = 256

    def __post_init__(self) -> None:
        check_whole(1, count=self.num, tokens=self.num_tokens)
        if not 0.0 <= self.share <= 1.0:
            raise ConfigError(f"the share of prompts must be between 0 and 1, not {self.share:g}")


@dataclass(frozen=True, slots=True)
class Content:
    """Parameters of contents, for any lengths and arrivals."""

    vocabulary: Vocabulary = Vocabulary()
    tenants: Tenants = Tenants()
    prefixes: Prefixes = Prefixes()

    @property
    def tenant_names(self) -> frozenset[str]:
        """Tenants that requests may name; none with a single tenant."""
        return frozenset(self.tenants.names if self.tenants.num > 1 else ())


@dataclass(slots=True)
class ContentMaker:
    """Draws tenants and prompts in order; the same seed gives the same contents."""

    content: Content
    seed: int | str
    _draw: Random = field(init=False)
    _tenants: Random = field(init=False)
    _cumulative: list[float] = field(init=False)
    _prefixes: dict[tuple[str | None, int], list[int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._draw = stream(self.seed, "prompts")
        self._tenants = stream(self.seed, "tenants")
        self._cumulative = list(accumulate(self.content.tenants.shares))

    def tenant(self) -> str | None:
        """Draw a tenant; None with a single tenant."""
        tenants = self.content.tenants
        if tenants.num == 1:
            return None
        return self._tenants.choices(tenants.names, cum_weights=self._cumulative)[0]

    def prompt(self, num_tokens: int, tenant: str | None) -> tuple[int, ...]:
        """Draw a prompt, with or without a prefix of the tenant."""
        prefixes = self.content.prefixes
        prefix: list[int] = []
        if prefixes.share and self._draw.random() < prefixes.share:
            prefix = self._prefix(tenant, self._draw.randrange(prefixes.num))
        num_own = max(1, num_tokens - len(prefix))
        return (*prefix, *self.content.vocabulary.token_ids(self._draw, num_own))

    def prompt_of_blocks(
        self, num_tokens: int, hash_ids: Sequence[int], block_tokens: int
    ) -> tuple[int, ...]:
        """Return a prompt whose blocks are equal where their hash ids are equal."""
        vocabulary = self.content.vocabulary
        token_ids: list[int] = []
        for hash_id in hash_ids:
            if len(token_ids) >= num_tokens:
                break
            token_ids += vocabulary.token_ids(stream(self.seed, f"block/{hash_id}"), block_tokens)
        token_ids += vocabulary.token_ids(self._draw, max(0, num_tokens - len(token_ids)))
        return tuple(token_ids[:num_tokens])

    def _prefix(self, tenant: str | None, number: int) -> list[int]:
        key = (tenant, number)
        if key not in self._prefixes:
            draw = stream(self.seed, f"prefix/{tenant}/{number}")
            length = self.content.prefixes.num_tokens
            self._prefixes[key] = self.content.vocabulary.token_ids(draw, length)
        return self._prefixes[key]


def stream(seed: int | str, name: str) -> Random:
    """Return a random stream per purpose, so that another rate leaves lengths unchanged."""
    return Random(f"{seed}/{name}")


def parse_tenants(text: str) -> Tenants:
    """Parse tenants such as `30,zipf=1.2`."""

    def make(num: float, zipf: float = DEFAULT_ZIPF) -> Tenants:
        check_whole(1, tenants=num)
        return Tenants(int(num), zipf)

    return parse_parts(text, text, Form("NUMBER[,zipf=EXPONENT]", make, optional=("zipf",)))


def parse_prefixes(text: str) -> Prefixes:
    """Parse prefixes such as `0.35,count=4,tokens=256`."""

    def make(share: float, count: float = 1, tokens: float = 256) -> Prefixes:
        check_whole(1, count=count, tokens=tokens)
        return Prefixes(share, int(count), int(tokens))

    usage = "SHARE[,count=PREFIXES_PER_TENANT][,tokens=LENGTH]"
    return parse_parts(text, text, Form(usage, make, optional=("count", "tokens")))


def parse_vocabulary(text: str) -> Vocabulary:
    """Parse a token id range such as `100,20000`."""

    def make(low: float, high: float) -> Vocabulary:
        check_whole(0, low=low, high=high)
        return Vocabulary(int(low), int(high))

    return parse_parts(text, text, Form("LOW,HIGH (HIGH itself left out)", make, num_values=2))
