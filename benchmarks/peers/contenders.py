"""Contenders of a comparison: commands of the runners of Headway and the peers."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.catalog import (
    HEADWAY,
    PEERS,
    ROOT,
    Peer,
    folder_of,
    preloads,
    python_of,
    record_of,
)
from benchmarks.peers.host import Launch
from benchmarks.peers.runner import KV_CACHE_GIB

OFFLINE = (
    ("HF_HUB_OFFLINE", "1"),
    ("TRANSFORMERS_OFFLINE", "1"),
    ("TOKENIZERS_PARALLELISM", "false"),
)


@dataclass(frozen=True, slots=True)
class Variant:
    """Headway with some settings; the others have their defaults."""

    settings: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        if not self.settings:
            return HEADWAY
        return f"{HEADWAY} {','.join(f'{key}={value}' for key, value in self.settings)}"

    @property
    def variables(self) -> tuple[tuple[str, str], ...]:
        settings = [(f"HEADWAY_{key.replace('-', '_').upper()}", v) for key, v in self.settings]
        # The environment may have Headway installed from another checkout.
        return (("PYTHONPATH", str(ROOT / "src")), *settings)


def parse_variant(text: str) -> Variant:
    """Parse settings such as `dtype=bf16,num_threads=2`; an empty text: defaults."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if any(not equals for _, equals, _ in pairs):
        raise ValueError(f"settings are key=value, comma separated, not {text!r}")
    return Variant(tuple((key.strip(), value.strip()) for key, _, value in pairs))


def headway_launch(variant: Variant, model: Path, workloads: Path) -> Launch:
    command = _command(Path(sys.executable), "run_headway", model, workloads)
    return Launch(variant.name, "this project", command, variant.variables)


def peer_launch(name: str, cache: Path, model: Path, workloads: Path) -> Launch:
    """Return the launch of a peer, or the reason why it is unavailable."""
    peer = PEERS[name]
    given = model if peer.form is None else folder_of(cache, model, peer.form)
    command = _command(python_of(cache, peer.environment), peer.module, given, workloads)
    for option in (*peer.options, *([f"form={peer.form}"] if peer.form else [])):
        command += ("--option", option)
    unavailable = None
    if not record_of(cache, peer.environment).exists():
        unavailable = f"not prepared: python -m benchmarks.peers prepare --peers {name}"
    elif not given.exists():
        unavailable = f"its weights are missing: python -m benchmarks.peers prepare --peers {name}"
    return Launch(name, peer.about, command, _variables(peer, cache), unavailable)


def _command(python: Path, module: str, model: Path, workloads: Path) -> tuple[str, ...]:
    arguments = ("--model", str(model), "--workloads", str(workloads))
    return (str(python), "-m", f"benchmarks.peers.{module}", *arguments)


def _variables(peer: Peer, cache: Path) -> tuple[tuple[str, str], ...]:
    variables = list(OFFLINE)
    if peer.environment == "vllm":
        home = cache / "vllm"
        variables += [
            ("LD_PRELOAD", _joined(preloads(cache, "vllm"))),
            ("VLLM_CPU_KVCACHE_SPACE", str(KV_CACHE_GIB)),
            # Compiled files are kept, so that only the first start compiles.
            ("VLLM_CACHE_ROOT", str(home / "compiled")),
            ("TORCHINDUCTOR_CACHE_DIR", str(home / "compiled" / "inductor")),
            ("VLLM_NO_USAGE_STATS", "1"),
            ("VLLM_LOGGING_LEVEL", "WARNING"),
        ]
    if peer.is_one_process:
        variables += _vllm_threads(sorted(os.sched_getaffinity(0)))
    return tuple(variables)


def _vllm_threads(cores: Sequence[int]) -> list[tuple[str, str]]:
    """Return the thread settings of vLLM's worker, for all cores."""
    listed = ",".join(str(core) for core in cores)
    return [
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        ("OMP_NUM_THREADS", str(len(cores))),
        ("KMP_AFFINITY", f"granularity=fine,explicit,proclist=[{listed}]"),
        ("KMP_BLOCKTIME", "5"),
        ("KMP_TPAUSE", "0"),
    ]


def _joined(paths: Sequence[Path]) -> str:
    return ":".join(str(path) for path in paths)
