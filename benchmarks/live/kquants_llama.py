# pyright: basic, reportMissingImports=false
"""The llama.cpp side of kquants.py, run in the environment of that peer.

python -m benchmarks.live.kquants_llama MODEL.gguf CONTEXT RUNNING...
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from benchmarks.peers.run_llama_cpp import LlamaCppBackend
from benchmarks.peers.runner import SAMPLINGS, Item

NUM_OUTPUT = 32
GREEDY = SAMPLINGS["greedy"]


def main() -> None:
    path, context, running = Path(sys.argv[1]), int(sys.argv[2]), [int(n) for n in sys.argv[3:]]
    started_at = time.perf_counter()
    backend = LlamaCppBackend(path)
    load_s = time.perf_counter() - started_at
    rates = []
    for count in running:
        items = [Item([100 + at] * context, NUM_OUTPUT) for at in range(count)]
        backend.arrange(items, GREEDY)
        # The last prompt is computed last: from its first token on, all requests decode.
        last = backend.run(items, GREEDY)[-1]
        rates.append(count * (NUM_OUTPUT - 1) / (last.last_at - last.first_at))
    print(
        f"{'llama.cpp':9} {load_s:7.2f} {'':10} {'':12}  " + "  ".join(f"{r:11.1f}" for r in rates)
    )


if __name__ == "__main__":
    main()
