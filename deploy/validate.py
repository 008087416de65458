"""Checks rendered manifests against schemas: python deploy/validate.py VERSION... -- FILE...

Objects of Kubernetes by kubernetes-validate, for each version; ScaledObjects by the models of
cloudcoil. Objects whose schema is in no package are counted and named.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import kubernetes_validate  # pyright: ignore[reportMissingImports]
import yaml

UNKNOWN_GROUPS = ("monitoring.coreos.com", "ray.io", "inference.networking.k8s.io")


def check(found: dict[str, Any], versions: list[str]) -> str:
    """Raise if an object does not fit its schema; return how it was checked."""
    group = found["apiVersion"].partition("/")[0]
    if group in UNKNOWN_GROUPS:
        return f"no schema: {found['kind']}"
    if group == "keda.sh":
        from cloudcoil.models.keda.v1alpha1 import (  # pyright: ignore[reportMissingImports]
            ScaledObject,
        )

        ScaledObject.model_validate(found)
        return "ScaledObject (cloudcoil)"
    for version in versions:
        kubernetes_validate.validate(found, version, strict=True)
    return f"Kubernetes {', '.join(versions)}"


def main() -> int:
    """Check every file; return the exit code."""
    cut = sys.argv.index("--")
    versions, paths = sys.argv[1:cut], sys.argv[cut + 1 :]
    counts: Counter[str] = Counter()
    num_wrong = 0
    for path in map(Path, paths):
        for found in yaml.safe_load_all(path.read_text()):
            try:
                counts[check(found, versions)] += 1
            except Exception as error:
                num_wrong += 1
                name = f"{path.stem}: {found['kind']} {found['metadata']['name']}"
                print(f"{name}: {error}", file=sys.stderr)
    for how, number in sorted(counts.items()):
        print(f"manifests: {number} by {how}")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
