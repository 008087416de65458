"""Runs the JSON-Schema-Test-Suite through the grammars of structured output.

python -m benchmarks.live.schema_suite MODEL FOLDER [--json FILE]

FOLDER is `tests/draft2020-12` of the suite (the source package of jsonschema on PyPI contains it).
A schema is refused, or each instance of its tests is written as JSON and must be accepted exactly
if it is valid. Whether an instance is rejected only because of the order of its properties is not
distinguished: outputs have the order of the schema. Fails if something invalid is accepted by a
schema that is not of the folder `optional`.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from headway.errors import InvalidRequestError
from headway.text import Tokenizer
from headway.text.grammar import json_grammar
from headway.text.matchers import Matchers


def accepts(matchers: Matchers, tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    matcher = matchers.matcher(grammar)
    mask = np.empty(-(-tokenizer.vocab_size // 32), dtype=np.int32)
    try:
        matcher.consume(tokenizer.encode(text, add_special_tokens=False))
        matcher.write_mask(mask)
    except ValueError:
        return False
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return any(bits[one] for one in tokenizer.eos_token_ids)


def run(matchers: Matchers, tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Return how the schemas and instances of a folder fared."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for path in sorted(folder.rglob("*.json")):
        kind = "optional " if "optional" in path.parts else ""
        for group in json.loads(path.read_text()):
            counts[f"{kind}schemas"] += 1
            try:
                grammar = json_grammar(group["schema"])
                matchers.check(grammar)
            except InvalidRequestError:
                counts[f"{kind}schemas refused"] += 1
                continue
            for test in group["tests"]:
                text = json.dumps(test["data"], ensure_ascii=False)
                is_accepted = accepts(matchers, tokenizer, grammar, text)
                if is_accepted == test["valid"]:
                    counts[f"{kind}instances right"] += 1
                    continue
                what = "accepted though invalid" if is_accepted else "rejected though valid"
                counts[f"{kind}instances {what}"] += 1
                name = path.relative_to(folder)
                wrong.append(f"{name}: {group['description']}: {test['description']}: {what}")
    return {"counts": dict(counts), "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_path(args.model)
    report = run(Matchers(lambda: tokenizer, tokenizer.vocab_size), tokenizer, args.folder)
    for name, count in sorted(report["counts"].items()):
        print(f"{count:5d} {name}")
    for line in report["wrong"]:
        print(line)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if report["counts"].get("instances accepted though invalid"):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
