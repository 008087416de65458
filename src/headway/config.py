"""Every setting, as the user asked for it: frozen sections, never changed after they are read.

Precedence: defaults < config file < environment < flags. This is the only module that reads
environment variables. What "auto" means on a given machine is decided in headway.resolve.
"""

from __future__ import annotations

import logging
import os
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from headway.errors import ConfigError

logger = logging.getLogger(__name__)

ENV_PREFIX = "HEADWAY_"
SCRIPT_VARIABLES = frozenset({"HEADWAY_VENV", "HEADWAY_CACHE"})
"""Read by the scripts of the repository; no settings."""
_SERVICE_LINK = re.compile(
    r"HEADWAY_(?:\w+_)?"
    r"(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)"
)
_SERVICE_PORT = re.compile(r"HEADWAY_(?:\w+_)?PORT=(?:tcp|udp|sctp)://.*")
"""What Kubernetes sets in every pod for a Service whose name begins with `headway`. The second is a
setting's name too, so its value must also be that of a service."""
MODES = ("auto", "latency", "throughput", "fixed")
T = TypeVar("T")
_UNITS = {"k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}


def setting(default: T, about: str) -> T:
    """A field of a section, with the words its command-line flag is explained by."""
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which weights, and how they are held."""

    model: str = setting("", "A GGUF file, a folder with safetensors, or a Hugging Face id.")
    revision: str | None = setting(None, "Branch, tag or commit of a Hugging Face id.")
    dtype: str = setting(
        "auto", "How weights are held: auto (nearest to the file), fp32, bf16, int8 or int4."
    )
    kernels: str = setting(
        "auto", "Compiled kernels: auto, none, or at most plain, avx2, avx512 or amx."
    )
    deterministic: bool = setting(
        False,
        "Refuse to start unless a request's tokens are the same bit for bit whatever shares its "
        "batch, however it is chunked, preempted or resumed.",
    )
    device: str = setting("auto", "auto, cpu, or a torch device such as cuda:0.")
    max_model_len: int | None = setting(
        None, "Longest prompt plus output, in tokens; default: what the model was made for."
    )
    num_threads: int | None = setting(
        None, "Threads of the executor; default: the cores this process may use."
    )

    def __post_init__(self) -> None:
        _check_at_least(self, 1, "max_model_len", "num_threads")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV cache."""

    block_size: int = setting(16, "Tokens per KV block.")
    kv_cache_memory_bytes: int | None = setting(
        None, "Size of the KV cache, e.g. 2G; default: chosen from the memory that is free."
    )
    kv_cache_dtype: str = setting("auto", "How keys and values are held: auto, bf16 or int8.")
    enable_prefix_caching: bool = setting(True, "Reuse the blocks of equal prefixes.")
    preemption_store_bytes: int | None = setting(
        None, "Memory for blocks of preempted requests; 0: none; default: a quarter of the cache."
    )

    def __post_init__(self) -> None:
        _check_at_least(self, 1, "block_size", "kv_cache_memory_bytes")
        _check_at_least(self, 0, "preemption_store_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Who runs when."""

    max_num_seqs: int = setting(64, "Most requests running at once.")
    max_num_batched_tokens: int = setting(512, "Most tokens computed in one step.")
    scheduling_policy: str = setting(
        "fair",
        "Order of the waiting line: fair (tenants by their shares, then by priority), deadline "
        "(by what was promised), fcfs or priority.",
    )
    max_wait_s: float = setting(
        10.0,
        "Aging: a request that has waited so long since it arrived or was last preempted, in "
        "seconds, goes before all others, under fair before all others of its tenant, and smaller "
        "requests no longer overtake it when it does not fit.",
    )
    prefill_floor: int = setting(
        64, "Tokens of a step that decodes leave to prefill while any waits."
    )
    prefill_cap: int | None = setting(
        None,
        "Most prefill tokens in a step that also decodes; default: whatever the budget leaves.",
    )
    kv_watermark: float = setting(
        0.01, "Share of the KV blocks that admission leaves free for running requests to grow into."
    )
    max_preemptions: int = setting(4, "After so many preemptions a request is immune.")
    mode: str = setting(
        "auto",
        "What a step's size follows: auto (the tightest TPOT target that is active), latency (the "
        "same, and short steps where nobody has a target), throughput (large steps) or fixed.",
    )
    preemption_method: str = setting(
        "auto", "How blocks are given up: auto (by cost), trim, checkpoint or recompute."
    )

    def __post_init__(self) -> None:
        _check_at_least(self, 1, "max_num_seqs", "max_preemptions", "prefill_floor")
        _check_at_least(self, 0, "max_wait_s")
        if self.prefill_floor >= self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be larger than "
                f"prefill_floor ({self.prefill_floor})"
            )
        if self.prefill_cap is not None and self.prefill_cap < self.prefill_floor:
            raise ConfigError(
                f"prefill_cap ({self.prefill_cap}) is below prefill_floor ({self.prefill_floor})"
            )
        if self.mode not in MODES:
            raise ConfigError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        if not 0.0 <= self.kv_watermark < 1.0:
            raise ConfigError(f"kv_watermark must be in [0, 1), got {self.kv_watermark}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP side."""

    host: str = setting(
        "127.0.0.1", "Address to listen on; the default is reachable from this machine only."
    )
    port: int = setting(8000, "Port to listen on.")
    api_key: tuple[str, ...] = setting(
        (), "Keys clients must send; none means no authentication. May be given more than once."
    )
    api_keys_file: str | None = setting(
        None, "File of hashed keys, one per client; `headway keys new` writes it."
    )
    tenants_file: str | None = setting(
        None, "YAML file of tenants and tiers, read again when it changes; see `headway tenants`."
    )
    trusted_proxy: tuple[str, ...] = setting(
        (), "Addresses or networks whose gateway headers name tenants. May be given more than once."
    )
    allowed_host: tuple[str, ...] = setting(
        (),
        "Host names clients may use, * for any; default: loopback names if the server listens on "
        "loopback, else any. May be given more than once.",
    )
    admin_host: str = setting("127.0.0.1", "Address of the admin listener, which has /metrics.")
    admin_port: int | None = setting(8001, "Port of the admin listener; none turns it off.")
    max_num_samples: int = setting(8, "Most samples (n) of one prompt.")
    max_output_tokens_per_request: int = setting(
        131_072, "Most output tokens one HTTP request may ask for, over all prompts and samples."
    )
    served_model_name: tuple[str, ...] = setting(
        (), "Names clients may use for the model; default: the model as given."
    )
    log_interval_s: float = setting(10.0, "Seconds between two lines of statistics in the log.")
    max_body_bytes: int = setting(4 * 1024**2, "Largest request body that is read.")
    max_num_queued_reqs: int = setting(
        256,
        "Most requests in the waiting queue; more are refused with 503. Under fair, of one tenant; "
        "twice as many of all.",
    )
    max_num_queued_tokens: int = setting(
        262_144,
        "Most prompt tokens in the waiting queue; more are refused with 503. Under fair, of one "
        "tenant; twice as many of all.",
    )
    max_num_queued_reqs_per_key: int | None = setting(
        None,
        "Most requests of one tenant (without a tenants file: of one API key) waiting for a "
        "seat; more are refused with 429.",
    )
    max_queue_wait_s: float = setting(
        10.0, "A request expected to wait longer than this, in seconds, is refused at once."
    )
    max_queue_age_s: float = setting(
        30.0, "A request that has waited longer than this, in seconds, is refused."
    )
    slow_reader_timeout_s: float = setting(
        30.0, "A client that has not read anything for so long, in seconds, is cut off."
    )
    max_engine_restarts: int = setting(
        10, "How often a failed engine is replaced within the window; then the answer is 503."
    )
    engine_restart_window_s: float = setting(600.0, "The window of max_engine_restarts, in s.")
    engine_hang_s: float = setting(
        10.0,
        "An engine with work that ends no step for so long, in seconds, and for 20 times its usual "
        "step, is taken for hung.",
    )
    shutdown_timeout: float = setting(
        30.0, "How long, in seconds, answers in progress may take after the first signal to stop."
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        if self.admin_port is not None and not 0 <= self.admin_port <= 65535:
            raise ConfigError(f"admin_port must be between 0 and 65535, got {self.admin_port}")
        _check_at_least(self, 1, "max_body_bytes", "max_num_samples")
        _check_at_least(self, 1, "max_output_tokens_per_request", "max_num_queued_reqs_per_key")
        _check_at_least(self, 1, "max_num_queued_reqs", "max_num_queued_tokens")
        _check_at_least(self, 0, "max_queue_wait_s", "max_queue_age_s", "shutdown_timeout")
        _check_at_least(self, 0, "max_engine_restarts", "engine_restart_window_s")
        for name in ("log_interval_s", "slow_reader_timeout_s", "engine_hang_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if any(not key for key in self.api_key):
            raise ConfigError("an api_key is empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerConfig:
    """What is kept of requests that have ended."""

    ledger_url: str = setting(
        "auto", "sqlite:///path, postgresql://..., none, or auto: a file in the state directory."
    )
    ledger_retention_days: float | None = setting(90.0, "How long rows are kept; none: for ever.")
    ledger_spool_bytes: int = setting(2**28, "Most bytes of rows that wait on disk for it.")

    def __post_init__(self) -> None:
        _check_at_least(self, 0, "ledger_retention_days", "ledger_spool_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All sections. A constructor below takes only the section it needs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    ledger: LedgerConfig = field(default_factory=LedgerConfig)


SECTIONS: dict[str, type[Any]] = {name: section for name, section in get_type_hints(Config).items()}


def load_config(
    flags: Mapping[str, object],
    file: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Merge the sources into one Config. Keys are flat and may be spelled with - or _."""
    merged = {_normal(key): value for key, value in (file or {}).items() if value is not None}
    merged.update(_from_environment(os.environ if environ is None else environ))
    merged.update({_normal(key): value for key, value in flags.items() if value is not None})
    sections: dict[str, Any] = {}
    for section, cls in SECTIONS.items():
        hints = get_type_hints(cls)
        values = {
            spec.name: _convert(spec.name, merged.pop(spec.name), hints[spec.name])
            for spec in fields(cls)
            if spec.name in merged
        }
        sections[section] = cls(**values)
    if merged:
        raise ConfigError(f"unknown setting: {', '.join(sorted(merged))}")
    return Config(**sections)


def state_dir() -> str:
    """Where this user's programs keep what they must not forget."""
    return (os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")) + "/headway"


def _check_at_least(section: object, low: int, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        if value is not None and not value >= low:  # put so that NaN is refused too
            raise ConfigError(f"{name} must be at least {low}, got {value}")


def _normal(key: str) -> str:
    return key.replace("-", "_")


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    names = [spec.name for section in SECTIONS.values() for spec in fields(section)]
    known = {ENV_PREFIX + name.upper(): name for name in names}
    ours = {key: value for key, value in environ.items() if key.startswith(ENV_PREFIX)}
    links = sorted(key for key, value in ours.items() if _is_service_link(key, value))
    if links:
        logger.warning(
            "ignored what Kubernetes sets for a Service, no settings: %s "
            "(enableServiceLinks: false in the pod's spec turns them off)",
            ", ".join(links),
        )
        ours = {key: value for key, value in ours.items() if key not in links}
    unknown = sorted(ours.keys() - known.keys() - SCRIPT_VARIABLES)
    if unknown:
        raise ConfigError(f"unknown setting in the environment: {', '.join(unknown)}")
    return {known[key]: value for key, value in ours.items() if key in known}


def _is_service_link(key: str, value: str) -> bool:
    """Whether Kubernetes made this variable, by its documented shapes."""
    if _SERVICE_PORT.fullmatch(f"{key}={value}"):
        return True
    return _SERVICE_LINK.fullmatch(key) is not None


def _convert(name: str, value: object, hint: Any) -> Any:
    """Read a setting from text or YAML as its declared type."""
    if get_origin(hint) in (Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() in ("none", "auto", "")):
            return None
        hint = next(arg for arg in get_args(hint) if arg is not type(None))
    try:
        if get_origin(hint) is tuple:
            parts = value.split(",") if isinstance(value, str) else value
            return tuple(str(part) for part in parts)  # type: ignore[union-attr]
        if hint is bool:
            return _to_bool(value)
        if hint is int:
            return _to_int(value)
        return hint(value)
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise ConfigError(f"{name}: {value!r} is not a valid {hint.__name__}") from error


def _to_bool(value: object) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    return words[str(value).lower()]


def _to_int(value: object) -> int:
    if isinstance(value, bool):
        raise ValueError(value)
    if isinstance(value, int):
        return value
    text = str(value).strip().lower().removesuffix("b").removesuffix("i")
    if text and text[-1] in _UNITS:
        return int(float(text[:-1]) * _UNITS[text[-1]])
    return int(text)
