"""Settings as the user gave them, in frozen sections.

Precedence: defaults < config file < environment < flags. No other module reads environment
variables. headway.resolve decides what "auto" means on a machine.
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
SCRIPT_VARIABLES = frozenset({"HEADWAY_VENV", "HEADWAY_CACHE", "HEADWAY_KERNELS"})
"""Variables of the repository's scripts; not settings."""
_SERVICE_LINK = re.compile(
    r"HEADWAY_(?:\w+_)?"
    r"(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)"
)
_SERVICE_PORT = re.compile(r"HEADWAY_(?:\w+_)?PORT=(?:tcp|udp|sctp)://.*")
"""Variables that Kubernetes sets in every pod for a Service whose name begins with `headway`.

A setting may have the name that the second pattern matches, so that pattern also checks the value.
"""
_RAY_VARIABLES = ("RAY_", "OMP_NUM_THREADS", "PYTHONBREAKPOINT")
"""Beginnings of the variables that Ray sets for its workers."""
MODES = ("auto", "latency", "throughput", "fixed")
FAILOVERS = ("identical", "any")
LOG_FORMATS = ("text", "json")
TOOL_CALL_PARSERS = ("auto", "hermes", "llama", "mistral", "qwen-xml", "generic")
REASONING_FIELDS = ("reasoning_content", "reasoning")
ROUTINGS = ("ttft", "cache-aware", "least-loaded", "round-robin")
T = TypeVar("T")
_HOST = r"[A-Za-z0-9_.-]+|\[[0-9a-fA-F:.]+\]"
_URL = re.compile(rf"https?://(?:{_HOST})(?::([0-9]{{1,5}}))?(?:/[!-~]*)?")
_HEADER = re.compile(r"[A-Za-z0-9-]+=[ -~]*")
_UNITS = {"k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}


def setting(default: T, about: str) -> T:
    """Return a field of a section; `about` is the help text of its flag."""
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model, its number format and its kernels."""

    model: str = setting("", "Model: a GGUF file, a folder with safetensors, or a Hugging Face id.")
    revision: str | None = setting(None, "Branch, tag or commit of a Hugging Face id.")
    dtype: str = setting(
        "auto", "Data type of the weights: auto (nearest to the file), fp32, bf16, int8 or int4."
    )
    activation_dtype: str = setting(
        "auto",
        "Data type of the inputs of matrix products with int8 or int4 weights: auto (int8 with "
        "VNNI and without AMX, else bf16), bf16 or int8.",
    )
    kernels: str = setting(
        "auto",
        "Compiled kernels: auto, none, or the highest level to use: plain, avx2, avx512, "
        "avx512_vnni or amx.",
    )
    deterministic: bool = setting(
        False,
        "Refuse to start unless the output of a request is bit-identical for any batch, chunking, "
        "preemption or resumption.",
    )
    device: str = setting("auto", "Device: auto, cpu, or a torch device such as cuda:0.")
    max_model_len: int | None = setting(
        None, "Longest prompt plus output, in tokens; default: the limit of the model."
    )
    num_threads: int | None = setting(
        None, "Number of executor threads; default: the cores available to this process."
    )
    weights_cache: str = setting(
        "auto", "Folder of packed weights: auto (in the user's cache directory), none or a path."
    )
    weights_cache_bytes: int = setting(
        20 * 1024**3, "Most bytes of packed weights; the least recently used are deleted first."
    )

    def __post_init__(self) -> None:
        _check_at_least(self, 1, "max_model_len", "num_threads")
        _check_at_least(self, 0, "weights_cache_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Size and format of the KV cache."""

    block_size: int = setting(16, "Tokens per KV block.")
    kv_cache_memory_bytes: int | None = setting(
        None, "Size of the KV cache in bytes, e.g. 2G; default: computed from the free memory."
    )
    kv_cache_dtype: str = setting("auto", "Data type of the KV cache: auto, bf16 or int8.")
    enable_prefix_caching: bool = setting(True, "Reuse the KV blocks of equal prompt prefixes.")
    preemption_store_bytes: int | None = setting(
        None,
        "Bytes of the offload store of preempted requests; 0: none; default: 1/4 of the KV cache.",
    )

    def __post_init__(self) -> None:
        _check_at_least(self, 1, "block_size", "kv_cache_memory_bytes")
        _check_at_least(self, 0, "preemption_store_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and policy of the scheduler."""

    max_num_seqs: int = setting(64, "Most sequences in the running set.")
    max_num_batched_tokens: int = setting(512, "Most tokens computed in one step.")
    scheduling_policy: str = setting(
        "fair",
        "Order of the waiting queue: fair (by fair share of tenants, then by priority), deadline "
        "(by SLO targets), fcfs or priority.",
    )
    max_wait_s: float = setting(
        10.0,
        "Aging: seconds of waiting, since arrival or the last preemption, until a request goes "
        "first (under fair: first of its tenant) and is no longer skipped.",
    )
    prefill_floor: int = setting(
        64, "Tokens of each step reserved for prefill while a request waits for prefill."
    )
    prefill_cap: int | None = setting(
        None,
        "Most prefill tokens in a step with decodes; default: the rest of the token budget.",
    )
    kv_watermark: float = setting(
        0.01, "Share of the KV blocks (0 to 1) that admission leaves free as headroom."
    )
    max_preemptions: int = setting(4, "Number of preemptions after which a request is immune.")
    mode: str = setting(
        "auto",
        "Step size: auto (by the tightest active TPOT target), latency (the same, and short steps "
        "without targets), throughput (large steps) or fixed.",
    )
    preemption_method: str = setting(
        "auto", "Preemption method: auto (the cheapest), trim, checkpoint or recompute."
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
                f"prefill_cap ({self.prefill_cap}) must be at least prefill_floor "
                f"({self.prefill_floor})"
            )
        _check_one_of(self, "mode", MODES)
        if not 0.0 <= self.kv_watermark < 1.0:
            raise ConfigError(f"kv_watermark must be in [0, 1), got {self.kv_watermark}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server: addresses, keys and limits."""

    host: str = setting(
        "127.0.0.1", "Address to listen on; the default accepts only connections from this machine."
    )
    port: int = setting(8000, "Port to listen on.")
    api_key: tuple[str, ...] = setting(
        (), "API key that clients must send; repeatable; without a key there is no authentication."
    )
    api_keys_file: str | None = setting(
        None, "File of hashed API keys, written by `headway keys new`."
    )
    tenants_file: str | None = setting(
        None, "YAML file of tenants and tiers, reloaded when it changes; see `headway tenants`."
    )
    trusted_proxy: tuple[str, ...] = setting(
        (), "Address or network of a proxy whose gateway headers name tenants; repeatable."
    )
    allowed_host: tuple[str, ...] = setting(
        (),
        "Host name that clients may use, * for any; repeatable; default: loopback names if the "
        "server listens on loopback, else any.",
    )
    reuse_port: bool = setting(
        False,
        "Share the port with other servers of this user; a stop signal then first ends accepting.",
    )
    admin_host: str = setting("127.0.0.1", "Address of the admin listener: metrics, dashboard.")
    admin_port: int | None = setting(8001, "Port of the admin listener; none turns it off.")
    dashboard: bool = setting(True, "Serve the dashboard at /dashboard of the admin listener.")
    playground: bool = setting(True, "Serve the playground at /playground of the public listener.")
    max_num_samples: int = setting(8, "Most samples (n) per prompt.")
    max_output_tokens_per_request: int = setting(
        131_072, "Most output tokens of one HTTP request, over all prompts and samples."
    )
    served_model_name: tuple[str, ...] = setting(
        (), "Model name that clients may use; repeatable; default: the value of model."
    )
    tool_call_parser: str = setting(
        "auto",
        "Form of the model's tool calls: auto (found from the chat template), hermes, llama, "
        "mistral, qwen-xml, or generic (for templates without tools).",
    )
    reasoning_field: str = setting(
        "reasoning_content",
        "Field of a message that has the reasoning: reasoning_content or reasoning.",
    )
    log_interval_s: float = setting(10.0, "Seconds between two statistics lines in the log.")
    access_log: bool = setting(
        False, "Log a line for each answered request: path, status, time, ids; never its content."
    )
    log_prompts: str | None = setting(
        None,
        "Log prompts, without what matches the regular expressions in this file, one per line; "
        "default: prompts are never logged.",
    )
    max_body_bytes: int = setting(4 * 1024**2, "Largest request body, in bytes.")
    max_num_queued_reqs: int = setting(
        256,
        "Most waiting requests before 503; under fair, per tenant, and twice as many in all.",
    )
    max_num_queued_tokens: int = setting(
        262_144,
        "Most waiting prompt tokens before 503; under fair, per tenant, and twice as many in all.",
    )
    max_num_queued_reqs_per_key: int | None = setting(
        None,
        "Most waiting requests of one tenant (without a tenants file: of one API key) before 429.",
    )
    max_queue_wait_s: float = setting(
        10.0, "Longest expected wait, in seconds; longer waits are refused on arrival."
    )
    max_queue_age_s: float = setting(
        30.0, "Longest wait, in seconds; a request that has waited longer is refused."
    )
    slow_reader_timeout_s: float = setting(
        30.0, "Seconds without a read after which a client is disconnected."
    )
    shutdown_timeout: float = setting(
        30.0, "Seconds that running requests may take to finish after the first stop signal."
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
        for name in ("log_interval_s", "slow_reader_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        _check_one_of(self, "tool_call_parser", TOOL_CALL_PARSERS)
        _check_one_of(self, "reasoning_field", REASONING_FIELDS)
        if any(not key for key in self.api_key):
            raise ConfigError("api_key must not be empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionConfig:
    """How an engine process is watched and replaced."""

    standby: bool = setting(
        False,
        "Keep a second engine process that has loaded the weights and takes over when the engine "
        "fails; takes the memory of the weights twice.",
    )
    max_engine_restarts: int = setting(
        10, "Most engine restarts within engine_restart_window_s; beyond, the server answers 503."
    )
    engine_restart_window_s: float = setting(
        600.0, "Time window of max_engine_restarts, in seconds."
    )
    engine_hang_s: float = setting(
        10.0,
        "Least seconds without a finished step, and at least 20 mean steps, after which an engine "
        "with work counts as hung; time in which the engine computes counts a tenth.",
    )

    def __post_init__(self) -> None:
        _check_at_least(self, 0, "max_engine_restarts", "engine_restart_window_s")
        if not self.engine_hang_s > 0:
            raise ConfigError(f"engine_hang_s must be positive, got {self.engine_hang_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordConfig:
    """The recording of a process that schedules or routes, for `headway replay`."""

    record: str | None = setting(
        None,
        "Folder for recordings of the decisions of engine or router, without tokens or texts; see "
        "`headway replay`; default: nothing is recorded.",
    )
    record_file_bytes: int = setting(
        64 * 1024**2, "Largest file of a recording; it goes on in another."
    )
    record_total_bytes: int = setting(
        1024**3,
        "Most bytes of recordings in the folder; the oldest are deleted first, and a recording "
        "that has half of it ends.",
    )

    def __post_init__(self) -> None:
        _check_at_least(self, 64 * 1024, "record_file_bytes")
        if self.record_total_bytes < 2 * self.record_file_bytes:
            raise ConfigError(
                f"record_total_bytes ({self.record_total_bytes}) must be at least twice "
                f"record_file_bytes ({self.record_file_bytes})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """The log of every process."""

    log_format: str = setting("text", "Lines of the log: text, or json with one object each.")

    def __post_init__(self) -> None:
        _check_one_of(self, "log_format", LOG_FORMATS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Spans of requests, for a receiver of OpenTelemetry."""

    otlp_endpoint: str | None = setting(
        None,
        "URL of an OTLP receiver for spans of requests, such as http://127.0.0.1:4318 (without a "
        "path: /v1/traces); needs `pip install 'headway[otlp]'`; default: no spans are made.",
    )
    otlp_header: tuple[str, ...] = setting(
        (), "Header for the receiver, as NAME=VALUE; repeatable."
    )
    otlp_service_name: str = setting("headway", "Name of this server in spans (service.name).")

    def __post_init__(self) -> None:
        match = _URL.fullmatch(self.otlp_endpoint or "http://none")
        if match is None or int(match[1] or 1) > 65535:
            raise ConfigError(
                "otlp_endpoint must be http://HOST[:PORT][/PATH] or https://...; keys go into "
                "otlp_header"
            )
        if any(not _HEADER.fullmatch(one) for one in self.otlp_header):
            raise ConfigError("otlp_header must be NAME=VALUE")
        if self.otlp_header and self.otlp_endpoint is None:
            raise ConfigError("otlp_header needs otlp_endpoint: without it no spans are sent")


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerConfig:
    """The ledger of finished requests."""

    ledger_url: str = setting(
        "auto",
        "Ledger database: sqlite:///path, postgresql://..., none, or auto (a file in the state "
        "directory).",
    )
    ledger_retention_days: float | None = setting(
        90.0, "Days that ledger rows are kept; none: for ever."
    )
    ledger_spool_bytes: int = setting(2**28, "Most bytes of ledger rows in the spool on disk.")

    def __post_init__(self) -> None:
        _check_at_least(self, 0, "ledger_retention_days", "ledger_spool_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Uploaded files and batches: where they are kept, and how much."""

    batch_dir: str | None = setting(
        None, "Folder of uploaded files and batches; without it there are neither."
    )
    batch_tier: str = setting(
        "batch",
        "Tier of the requests of batches, for its weight, permissions and price; they are always "
        "spot. Tenants of a spot tier keep their own.",
    )
    batch_file_bytes: int = setting(100 * 1024**2, "Largest file that a client may upload.")
    batch_tenant_bytes: int = setting(1024**3, "Most bytes of files that one tenant may have.")
    batch_total_bytes: int = setting(16 * 1024**3, "Most bytes of files of all tenants.")
    batch_keep_days: float = setting(30.0, "Days that files and ended batches are kept.")
    max_batch_reqs: int | None = setting(
        None,
        "Most requests of batches that wait or run at a time; default: as many as the engines run.",
    )

    def __post_init__(self) -> None:
        _check_at_least(self, 1, "batch_file_bytes", "batch_tenant_bytes", "batch_total_bytes")
        _check_at_least(self, 1, "max_batch_reqs")
        _check_at_least(self, 0, "batch_keep_days")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """What every process of a cluster has in common."""

    cluster_key_file: str | None = setting(
        None,
        "File with the key of the cluster, written by `headway keys cluster`; without it, engines "
        "and frontends talk on this machine only.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerConfig:
    """Where an engine or a router waits for frontends."""

    listen: str = setting(
        "tcp://127.0.0.1:7600", "Address to wait for frontends on, as tcp://HOST:PORT."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanConfig:
    """What an engine does when its frontends are lost."""

    orphan_s: float = setting(
        30.0,
        "Seconds that a resumable request runs on after its frontend is lost, for another frontend "
        "to adopt; 0: none.",
    )
    lease_s: float | None = setting(
        None, "Seconds without any frontend after which the engine ends; default: never."
    )

    def __post_init__(self) -> None:
        _check_at_least(self, 0, "orphan_s")
        _check_at_least(self, 1, "lease_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig:
    """The engines of a frontend, and what happens when one is lost."""

    engine: tuple[str, ...] = setting((), "Address of an engine, as tcp://HOST:PORT; repeatable.")
    discover: str | None = setting(
        None,
        "Where to find engines: dns:NAME:PORT, file:PATH with one address per line, or "
        "fleet:tcp://HOST:PORT/POOL, the manager of a fleet.",
    )
    failover: str = setting(
        "identical",
        "Where a request goes on when its engine is lost: identical (in engines that compute the "
        "same tokens) or any (elsewhere too; its chunks then have another system_fingerprint).",
    )
    failover_s: float = setting(
        30.0, "Seconds that a request may be without an engine before it fails."
    )
    router: tuple[str, ...] = setting(
        (),
        "Address of a router that decides for several frontends, as tcp://HOST:PORT; repeatable: "
        "the first that answers decides, the others stand by. Without one, the frontend decides.",
    )

    def __post_init__(self) -> None:
        _check_one_of(self, "failover", FAILOVERS)
        _check_at_least(self, 0, "failover_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    """How a request finds its engine."""

    routing: str = setting(
        "ttft",
        "How a request finds its engine: ttft (least predicted time to the first token), "
        "cache-aware (most of the prompt cached, if loads are balanced), least-loaded (fewest "
        "sequences) or round-robin.",
    )

    def __post_init__(self) -> None:
        _check_one_of(self, "routing", ROUTINGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All sections.

    Each component takes only the section that it needs.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    supervision: SupervisionConfig = field(default_factory=SupervisionConfig)
    recording: RecordConfig = field(default_factory=RecordConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    logs: LogConfig = field(default_factory=LogConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    batches: BatchConfig = field(default_factory=BatchConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    listener: ListenerConfig = field(default_factory=ListenerConfig)
    orphans: OrphanConfig = field(default_factory=OrphanConfig)
    frontend: FrontendConfig = field(default_factory=FrontendConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)


SECTIONS: dict[str, type[Any]] = {name: section for name, section in get_type_hints(Config).items()}


def load_config(
    flags: Mapping[str, object],
    file: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Merge file, environment and flags into one Config.

    Keys are flat and may be spelled with - or _.
    """
    merged = {_normal(key): value for key, value in (file or {}).items() if value is not None}
    merged.update(_from_environment(os.environ if environ is None else environ))
    merged.update({_normal(key): value for key, value in flags.items() if value is not None})
    sections: dict[str, Any] = {}
    for section, cls in SECTIONS.items():
        hints = get_type_hints(cls)
        values = {
            spec.name: convert(spec.name, merged.pop(spec.name), hints[spec.name])
            for spec in fields(cls)
            if spec.name in merged
        }
        sections[section] = cls(**values)
    if merged:
        raise ConfigError(f"unknown setting: {', '.join(sorted(merged))}")
    return Config(**sections)


def state_dir() -> str:
    """Return the folder for files that must outlive the process."""
    return (os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")) + "/headway"


def daemon_environment() -> dict[str, str]:
    """Return the environment for a process of a fleet, without what Ray sets for its workers."""
    if "RAY_RAYLET_PID" not in os.environ:
        return dict(os.environ)
    items = os.environ.items()
    return {key: value for key, value in items if not key.startswith(_RAY_VARIABLES)}


def ray_environment() -> dict[str, str]:
    """Return the environment for a process that joins Ray: with its token, unless told not to."""
    return {"RAY_AUTH_MODE": "token", **os.environ}


def notify_address() -> str | None:
    """Return the socket on which the service manager (systemd) listens; None without one."""
    return os.environ.get("NOTIFY_SOCKET") or None


def watchdog_s() -> float | None:
    """Return how long the service manager waits for a sign of life; None: it does not."""
    is_ours = os.environ.get("WATCHDOG_PID", "") in ("", str(os.getpid()))
    limit_us = os.environ.get("WATCHDOG_USEC", "")
    return int(limit_us) / 1e6 if is_ours and limit_us.isdecimal() and int(limit_us) else None


def completion_words() -> list[str] | None:
    """Return the words after `headway` that a shell wants completed; None if it wants nothing."""
    if "_HEADWAY_COMPLETE" not in os.environ:
        return None
    words = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    return words.split()[1:]


def weights_cache_dir(section: ModelConfig) -> str | None:
    """Return the folder of packed weights; None if the user wants none."""
    if section.weights_cache == "none":
        return None
    if section.weights_cache != "auto":
        return os.path.expanduser(section.weights_cache)
    return (os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) + "/headway/weights"


def _check_at_least(section: object, low: int, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        if value is not None and not value >= low:  # this form refuses NaN too
            raise ConfigError(f"{name} must be at least {low}, got {value}")


def _check_one_of(section: object, name: str, values: tuple[str, ...]) -> None:
    if (value := getattr(section, name)) not in values:
        raise ConfigError(f"{name} must be one of {', '.join(values)}, got {value!r}")


def _normal(key: str) -> str:
    return key.replace("-", "_")


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    names = [spec.name for section in SECTIONS.values() for spec in fields(section)]
    known = {ENV_PREFIX + name.upper(): name for name in names}
    ours = {key: value for key, value in environ.items() if key.startswith(ENV_PREFIX)}
    links = sorted(key for key, value in ours.items() if _is_service_link(key, value))
    if links:
        logger.warning(
            "ignored variables that Kubernetes sets for a Service: %s "
            "(set enableServiceLinks: false in the pod's spec to remove them)",
            ", ".join(links),
        )
        ours = {key: value for key, value in ours.items() if key not in links}
    unknown = sorted(ours.keys() - known.keys() - SCRIPT_VARIABLES)
    if unknown:
        raise ConfigError(f"unknown setting in the environment: {', '.join(unknown)}")
    return {known[key]: value for key, value in ours.items() if key in known}


def _is_service_link(key: str, value: str) -> bool:
    """Whether Kubernetes set this variable, by its documented forms."""
    if _SERVICE_PORT.fullmatch(f"{key}={value}"):
        return True
    return _SERVICE_LINK.fullmatch(key) is not None


def convert(name: str, value: object, hint: Any) -> Any:
    """Convert a setting from text or YAML to its declared type."""
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
