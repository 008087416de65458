# pyright: basic, reportMissingImports=false
"""Writes the weights of a GGUF file as a bf16 folder; runs in the environment of transformers.

    python -m benchmarks.peers.convert MODEL.gguf FOLDER

Peers that cannot read the file compute with the same weights, dequantized once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, folder = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    where = {"pretrained_model_name_or_path": str(model.parent), "gguf_file": model.name}
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    weights = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    # A model loaded from GGUF cannot be saved; a new model with its weights can.
    config: Any = weights.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(weights.state_dict())
    plain.generation_config = weights.generation_config
    plain.save_pretrained(folder)


if __name__ == "__main__":
    main()
