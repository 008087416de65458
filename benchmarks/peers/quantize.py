# pyright: basic, reportMissingImports=false
"""Writes a bf16 folder as int8 in the format compressed-tensors; runs as convert.py does.

    python -m benchmarks.peers.quantize BF16_FOLDER FOLDER

W8A8: weights of the linear layers are rounded to int8 with a scale per output; the engine rounds
activations to int8 with a scale per token. Embeddings and head stay bf16.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
HIGHEST = 127


def main() -> None:
    from safetensors.torch import load_file, save_file

    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    shutil.copytree(source, folder)
    made: dict[str, Any] = {}
    for name, weight in load_file(source / WEIGHTS).items():
        if name.endswith("_proj.weight"):
            made[name], made[f"{name}_scale"] = rounded(weight)
        else:
            made[name] = weight
    save_file(made, folder / WEIGHTS, {"format": "pt"})
    config = json.loads((source / CONFIG).read_text())
    config["quantization_config"] = quantization()
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def rounded(weight: Any) -> tuple[Any, Any]:
    """Return int8 values, and one scale per output."""
    import torch

    exact = weight.float()
    scale = exact.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / HIGHEST
    return (exact / scale).round().clamp(-HIGHEST, HIGHEST).to(torch.int8), scale


def quantization() -> dict[str, Any]:
    int8 = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**int8, "strategy": "channel", "dynamic": False},
        "input_activations": {**int8, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


if __name__ == "__main__":
    main()
