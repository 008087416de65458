"""Complete a few prompts in this process: python examples/offline.py MODEL"""

import sys

from headway import LLM, SamplingParams

llm = LLM(sys.argv[1])
params = SamplingParams(max_tokens=24, temperature=0.7, seed=1)
for output in llm.generate(["The Seine is", "The Rhine is"], params):
    print(repr(output.prompt), "->", repr(output.outputs[0].text))
    print("   first token after", f"{output.metrics.ttft_s or 0:.3f} s")
