"""Settings of a simulation as text: `max_num_seqs=32`, `b.weight=2`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, get_type_hints

from headway.config import SchedulerConfig, convert
from headway.core.executor import Capacity
from headway.core.terms import Targets, Terms
from headway.errors import ConfigError
from headway.sim.fleet import EngineSpec
from headway.sim.prediction.setup import Setup, TermChange
from headway.workload import Listed, Workload

POLICY = "policy"
"""Short for scheduling_policy."""
DRIFT = "drift"
"""Standard deviation of the logarithm of an engine's speed, instead of the profile's."""
_MAX_DRIFT = 0.5
SLOWNESS = "slowness"
"""How many times as long as profiled everything takes: steps, delays, copies, starts."""
_MAX_SLOWNESS = 10.0
_TERMS = ("weight", "max_kv_share", "is_spot", "tier")
_MAX_TERM = 1e6
"""Largest weight, or target in seconds."""
_MAX_SHOWN = 8
"""Most tenants in a message."""
_TERM_FORM = "TENANT.FIELD=VALUE, such as b.weight=2"


def change_settings(setup: Setup, changes: Sequence[str]) -> Setup:
    """Return a setup with settings changed, given as KEY=VALUE."""
    spec, profile, slowness = setup.spec, setup.profile, 1.0
    for change in changes:
        key, value = _split(change, "KEY=VALUE, such as max_num_seqs=32")
        if key == DRIFT:
            if profile.is_datasheet:
                raise ConfigError(
                    "drift is for measured profiles: ranges by a datasheet have its error"
                )
            profile = replace(profile, drift=parse_drift(value))
        elif key == SLOWNESS:
            slowness = _parse_slowness(value)
        else:
            spec = _change_spec(spec, "scheduling_policy" if key == POLICY else key, value)
    # Once: of two values, the last one counts, as with other settings.
    block_copy_s = slowness * spec.capacity.block_copy_s
    spec = replace(spec, capacity=replace(spec.capacity, block_copy_s=block_copy_s))
    return replace(setup, spec=spec, profile=profile.slowed(slowness))


def parse_drift(text: str) -> float:
    """Return a drift given as text; ConfigError if it cannot be one."""
    try:
        drift = float(text)
    except ValueError:
        drift = -1.0
    if not 0.0 <= drift <= _MAX_DRIFT:
        raise ConfigError(f"drift must be a number from 0 to {_MAX_DRIFT:g}, not {text!r}")
    return drift


def _parse_slowness(text: str) -> float:
    try:
        slowness = float(text)
    except ValueError:
        slowness = 0.0
    least = 1.0 / _MAX_SLOWNESS
    if not least <= slowness <= _MAX_SLOWNESS:
        raise ConfigError(
            f"slowness must be a number from {least:g} to {_MAX_SLOWNESS:g}, not {text!r}"
        )
    return slowness


def _change_spec(spec: EngineSpec, key: str, value: str) -> EngineSpec:
    if key in _names(SchedulerConfig):
        return replace(spec, scheduler=_change(spec.scheduler, key, value))
    if key in _names(Capacity):
        capacity = _change(spec.capacity, key, value)
        if min(capacity.num_blocks, capacity.block_size, capacity.max_model_len) < 1:
            raise ConfigError(f"{key} must be at least 1, not {value}")
        return replace(spec, capacity=capacity)
    if key == "enable_prefix_caching":
        return _change(spec, key, value)
    others = (POLICY, DRIFT, SLOWNESS, "enable_prefix_caching")
    known = sorted([*others, *_names(SchedulerConfig), *_names(Capacity)])
    raise ConfigError(f"unknown setting {key!r}; one of {', '.join(known)}")


def parse_term_changes(changes: Sequence[str]) -> dict[str, TermChange]:
    """Return what changes in the terms of tenants, given as TENANT.FIELD=VALUE."""
    found: dict[str, TermChange] = {}
    for change in changes:
        name, value = _split(change, _TERM_FORM)
        tenant, _, field = name.rpartition(".")
        if not tenant:
            raise ConfigError(f"{change!r} is not {_TERM_FORM}")
        old = found.get(tenant, TermChange())
        if field in _TERMS:
            terms = {**old.terms, field: _convert_term(Terms, field, value)}
            found[tenant] = replace(old, terms=terms)
        elif field in _names(Targets):
            targets = {**old.targets, field: _convert_term(Targets, field, value)}
            found[tenant] = replace(old, targets=targets)
        else:
            known = ", ".join([*_TERMS, *_names(Targets)])
            raise ConfigError(f"unknown term {field!r} of a tenant; one of {known}")
    return found


def check_tenants(changes: Mapping[str, TermChange], workload: Workload) -> None:
    """Refuse changed terms of a tenant that has no requests in a load."""
    known = workload.tenant_names
    for tenant in changes:
        if tenant not in known:
            shown = ", ".join(sorted(known)[:_MAX_SHOWN]) + ", ..." * (len(known) > _MAX_SHOWN)
            hint = "" if isinstance(workload, Listed) else " (--tenants 2)"
            named = f"its tenants: {shown}" if known else f"it names no tenants{hint}"
            raise ConfigError(f"the load has no tenant {tenant!r}; {named}")


def _convert_term(cls: type[Any], field: str, value: str) -> Any:
    """Return a term; refuse a number that is not above 0, or too large."""
    term = convert_field(cls, field, value)
    most = 1.0 if field == "max_kv_share" else _MAX_TERM
    if isinstance(term, float) and not 0.0 < term <= most:
        raise ConfigError(f"{field} must be above 0 and at most {most:g}, not {value}")
    return term


def _split(change: str, form: str) -> tuple[str, str]:
    key, sign, value = change.partition("=")
    if not sign or not key or not value:
        raise ConfigError(f"{change!r} is not {form}")
    return key, value


def _names(cls: type[Any]) -> list[str]:
    return [one.name for one in fields(cls)]


def _change(old: Any, key: str, value: str) -> Any:
    return replace(old, **{key: convert_field(type(old), key, value)})


def convert_field(cls: type[Any], key: str, value: str) -> Any:
    """Return the value of a field of a dataclass, given as text."""
    return convert(key, value, get_type_hints(cls)[key])
