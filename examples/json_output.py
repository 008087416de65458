"""Outputs that follow a JSON schema: python examples/json_output.py MODEL"""

import json
import sys

from headway import LLM, SamplingParams
from headway.text.grammar import json_grammar

schema = {
    "type": "object",
    "properties": {
        "river": {"type": "string", "maxLength": 20},
        "country": {"enum": ["France", "Germany", "Spain"]},
        "length_km": {"type": "integer", "minimum": 1, "maximum": 9999},
    },
    "required": ["river", "country", "length_km"],
    "additionalProperties": False,
}
llm = LLM(sys.argv[1])
params = SamplingParams(max_tokens=80, temperature=0.8, seed=1, grammar=json_grammar(schema))
for output in llm.generate(["A river as JSON with river, country and length_km: "] * 3, params):
    print(json.loads(output.outputs[0].text))
