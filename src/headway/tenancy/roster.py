"""Reads a Roster from the tenants file.

An unknown or wrong entry is refused with its line. A key where a hash belongs is not repeated in
the error text, which would write it to a log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.core.terms import Targets
from headway.errors import ConfigError
from headway.tenancy.document import Section, parse
from headway.tenancy.keys import NAME, NAME_RULE, WRITTEN_RULE, read_digest
from headway.tenancy.values import (
    DEFAULT_PERMISSIONS,
    DEFAULT_TIER,
    MAX_TARGET_MS,
    MIN_TARGET_MS,
    Permissions,
    Price,
    Quotas,
    Roster,
    Tenant,
    Tier,
)

MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
MAX_QUOTA = 10**12
MAX_PRICE = 1e9

_TIER_ENTRIES = ("weight", "ttft_ms", "tpot_ms", "deadline_ms", "price", "spot")
_PERMISSION_ENTRIES = (
    "allow_targets",
    "allow_priority",
    "min_ttft_ms",
    "min_tpot_ms",
    "min_deadline_ms",
)
_PRICE_ENTRIES = ("prompt", "cached_prompt", "output")
_TENANT_ENTRIES = ("keys", "tier", "weight", "quotas", "cache_group", "admin", "disabled")
QUOTA_ENTRIES = ("requests_per_minute", "tokens_per_minute", "concurrent_requests", "kv_share")


def how_to_add(path: Path) -> str:
    """Return the hint for a file without a tenant."""
    return f"`headway tenants add NAME --file {path}` adds one"


def read_roster(path: Path) -> Roster:
    """Return the roster in a file, which must have a tenant."""
    try:
        return parse_roster(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"there is no tenants file {path}; {how_to_add(path)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the tenants file {path}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_roster(text: str) -> Roster:
    """Return the roster that a text describes."""
    if not text.strip():
        raise ConfigError("the file is empty; `headway tenants add NAME` adds a tenant")
    return roster_of(parse(text))


def roster_of(document: Section) -> Roster:
    """Return the roster that a document describes."""
    top = _Entries(document, "", ("tiers", "tenants"))
    tiers = {
        name: _tier(name, entries)
        for name, entries in top.sections("tiers", (*_TIER_ENTRIES, *_PERMISSION_ENTRIES), "tiers")
    }
    tenants: dict[str, Tenant] = {}
    owners: dict[bytes, str] = {}
    for name, entries in top.sections("tenants", _TENANT_ENTRIES, "tenants"):
        tenants[name] = _tenant(name, entries, tiers)
        for digest in tenants[name].key_digests:
            if owners.setdefault(digest, name) != name:
                raise entries.make_error(
                    "keys", f"one of these keys is already a key of tenant {owners[digest]}"
                )
    if not tenants:
        raise ConfigError("there are no tenants in the file; `headway tenants add NAME` adds one")
    return Roster(tenants, tiers)


def _tier(name: str, entries: _Entries) -> Tier:
    def seconds(entry: str) -> float | None:
        value = entries.number(entry, None, MIN_TARGET_MS, MAX_TARGET_MS)
        return None if value is None else value / 1000

    price = entries.section("price", _PRICE_ENTRIES)
    prompt = price.number("prompt", 0.0, 0.0, MAX_PRICE)
    return Tier(
        name,
        entries.number("weight", 1.0, MIN_WEIGHT, MAX_WEIGHT),
        Targets(seconds("ttft_ms"), seconds("tpot_ms"), seconds("deadline_ms")),
        Price(
            prompt,
            # Without a price of its own, a cached prompt token costs as much as any other.
            price.number("cached_prompt", prompt, 0.0, MAX_PRICE),
            price.number("output", 0.0, 0.0, MAX_PRICE),
        ),
        entries.flag("spot"),
        _permissions(entries),
    )


def _permissions(entries: _Entries) -> Permissions:
    def floor(entry: str) -> float:
        default = getattr(DEFAULT_PERMISSIONS, entry)
        return entries.number(entry, default, MIN_TARGET_MS, MAX_TARGET_MS)

    return Permissions(
        entries.flag("allow_targets", default=True),
        entries.flag("allow_priority", default=True),
        floor("min_ttft_ms"),
        floor("min_tpot_ms"),
        floor("min_deadline_ms"),
    )


def _tenant(name: str, entries: _Entries, tiers: Mapping[str, Tier]) -> Tenant:
    tier = entries.text("tier") or DEFAULT_TIER
    if tier not in tiers and tier != DEFAULT_TIER:
        known = ", ".join([*tiers, *([] if DEFAULT_TIER in tiers else [DEFAULT_TIER])])
        raise entries.make_error("tier", f"there is no tier {tier[:80]!r}; there are: {known}")
    quotas = entries.section("quotas", QUOTA_ENTRIES)
    share = quotas.number("kv_share", 1.0, 0.0, 1.0)
    if share == 0.0:
        raise quotas.make_error("kv_share", "must be more than 0")
    return Tenant(
        name,
        entries.digests("keys"),
        tier,
        entries.number("weight", 1.0, MIN_WEIGHT, MAX_WEIGHT),
        Quotas(
            quotas.count("requests_per_minute"),
            quotas.count("tokens_per_minute"),
            quotas.count("concurrent_requests"),
            share,
        ),
        entries.name("cache_group"),
        entries.flag("admin"),
        entries.flag("disabled"),
    )


class _Entries:
    """A section with a fixed set of entry names, read by type."""

    def __init__(self, section: Section, location: str, known: Sequence[str]) -> None:
        self._section = section
        self._location = location
        for name in section:
            if name not in known:
                raise self.make_error(name, f"is not known here; known are: {', '.join(known)}")

    def make_error(self, name: str, problem: str) -> ConfigError:
        location = f"{self._location}.{name[:80]}" if self._location else name[:80]
        return ConfigError(f"line {self._section.line_of(name)}: {location}: {problem}")

    def section(self, name: str, known: Sequence[str]) -> _Entries:
        """Return the section with this name; an empty section if it is left out."""
        value = self._section.get(name)
        if value is None:
            value = Section(self._section.line_of(name))
        if not isinstance(value, Section):
            raise self.make_error(name, f"must hold entries such as '{known[0]}: ...'")
        return _Entries(value, f"{self._location}.{name}" if self._location else name, known)

    def sections(
        self, name: str, known: Sequence[str], location: str
    ) -> Sequence[tuple[str, _Entries]]:
        """Return the sections under this name, whose names the user chose."""
        value = self._section.get(name)
        if value is None:
            return ()
        if not isinstance(value, Section):
            raise self.make_error(name, f"must hold a section for each of the {name}")
        outer = _Entries(value, location, list(value))
        for user_name in value:
            if not NAME.fullmatch(user_name):
                raise outer.make_error(user_name, f"a name must be {NAME_RULE}")
        return [(user_name, outer.section(user_name, known)) for user_name in value]

    def number(self, name: str, default: Any, low: float, high: float) -> Any:
        value = self._section.get(name)
        if value is None:
            return default
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:  # in this form NaN is refused too
            raise self.make_error(name, f"must be a number from {low:g} to {high:g}{_shown(value)}")
        return float(value)

    def count(self, name: str) -> int | None:
        value = self._section.get(name)
        if value is None:
            return None
        if type(value) is not int or not 1 <= value <= MAX_QUOTA:
            raise self.make_error(
                name, f"must be a whole number of at least 1, or left out{_shown(value)}"
            )
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._section.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.make_error(name, f"must be true or false{_shown(value)}")
        return default if value is None else value

    def text(self, name: str) -> str | None:
        value = self._section.get(name)
        if value is not None and not isinstance(value, str):
            raise self.make_error(name, f"must be text; put quotes around it{_shown(value)}")
        return value

    def name(self, name: str) -> str | None:
        value = self.text(name)
        if value is not None and not NAME.fullmatch(value):
            raise self.make_error(name, f"must be {NAME_RULE}")
        return value

    def digests(self, name: str) -> tuple[bytes, ...]:
        value = self._section.get(name)
        if value is None:
            return ()
        found = [
            read_digest(item) if isinstance(item, str) else None
            for item in (value if isinstance(value, list) else [None])
        ]
        digests = tuple(digest for digest in found if digest is not None)
        if len(digests) != len(found):
            raise self.make_error(
                name,
                f"must be a list of '{WRITTEN_RULE}', not of keys; "
                "`headway keys hash` makes that from a key",
            )
        return digests


def _shown(value: object) -> str:
    """Return the value for an error text, or nothing if the value is long."""
    plain = isinstance(value, bool | int | float | str)
    text = repr(value) if plain and not (isinstance(value, int) and value.bit_length() > 64) else ""
    return f", got {text}" if 0 < len(text) <= 40 else ""
