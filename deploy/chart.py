"""Makes the templates of the Helm chart of the Kubernetes manifests, which own every fact.

Templates use `.Values` and `if` alone, so that a few lines can render them too.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
MARK = re.compile(r"['\"]?<<(.*?)>>['\"]?")
"""A place for a template, as text that YAML keeps."""
MODEL, CLAIM = "<<.Values.model>>", "<<.Values.modelsClaim>>"
REPLICAS = re.compile(r"^  replicas: (.*\.fleet\.engines.*)$", re.MULTILINE)


def templates(kubernetes: Path, rule: Object) -> dict[str, str]:
    """Return the text of every template by the name of its file; `rule` has the alerts."""
    patches = yaml.safe_load((kubernetes / "one-node/with-keys.yaml").read_text())
    server = [patched(one, patches) for one in objects(kubernetes / "base/server.yaml")]
    one_node = [*server, *objects(kubernetes / "one-node/service.yaml")]
    fleet = [
        one
        for name in ("engines", "frontends", "network-policies")
        for one in objects(kubernetes / f"fleet/{name}.yaml")
    ]
    monitoring = [*objects(kubernetes / "monitoring/service-monitor.yaml"), rule]
    scaling = objects(kubernetes / "scaling/scaled-object.yaml")
    return {
        "one-node.yaml": when("not .Values.fleet.enabled", text_of(one_node)),
        "fleet.yaml": when(".Values.fleet.enabled", scaled(text_of(fleet))),
        "monitoring.yaml": when(".Values.monitoring.enabled", text_of(monitoring)),
        "scaling.yaml": when(
            ".Values.fleet.enabled", when(".Values.scaling.enabled", text_of(scaling))
        ),
    }


def objects(path: Path) -> list[Object]:
    """Return the objects of a file."""
    return list(yaml.safe_load_all(path.read_text()))


def patched(found: Object, patches: list[Object]) -> Object:
    """Return a copy with the patches of a kustomization: values replaced or added to lists."""
    found = copy.deepcopy(found)
    for patch in patches:
        *parents, last = patch["path"].strip("/").split("/")
        place: Any = found
        for name in parents:
            place = place[int(name)] if isinstance(place, list) else place[name]
        if last == "-":
            place.append(patch["value"])
        else:
            place[last] = patch["value"]
    return found


def text_of(found: list[Object]) -> str:
    """Return objects as text with templates where values belong."""
    marked = [_with_values(one) for one in found]
    text = yaml.safe_dump_all(marked, sort_keys=False, width=1000)
    # Prometheus has templates of the same form.
    text = text.replace("{{", '{{ "{{" }}')
    return MARK.sub(r"{{ \1 }}", text)


def when(condition: str, text: str) -> str:
    """Return text that is there under a condition."""
    return f"{{{{- if {condition} }}}}\n{text.rstrip()}\n{{{{- end }}}}\n"


def scaled(text: str) -> str:
    """Leave the number of engines to KEDA where it scales them."""
    found, number = REPLICAS.subn(
        r"{{- if not .Values.scaling.enabled }}\n  replicas: \1\n{{- end }}", text
    )
    if number != 1:
        raise ValueError("the engines have no number of replicas")
    return found


def _with_values(found: Object) -> Object:
    found = copy.deepcopy(found)
    spec = found["spec"]
    kind, name = found["kind"], found["metadata"]["name"]
    if kind == "ScaledObject":
        spec["maxReplicaCount"] = "<<.Values.scaling.maxEngines>>"
        spec["fallback"]["replicas"] = "<<.Values.fleet.engines>>"
        for trigger in spec["triggers"]:
            trigger["metadata"]["serverAddress"] = "<<.Values.scaling.prometheus>>"
    if kind not in ("Deployment", "StatefulSet"):
        return found
    counts = {"headway-engine": "engines", "headway-frontend": "frontends"}
    if name in counts:
        spec["replicas"] = f"<<.Values.fleet.{counts[name]}>>"
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    container["image"] = "<<.Values.image>>"
    container["args"] = [
        MODEL if arg == "/models/model.gguf" else _memory(arg) for arg in container["args"]
    ]
    if name != "headway-frontend":
        container["resources"] = {
            "requests": {"cpu": "<<.Values.cpu | quote>>", "memory": "<<.Values.memory>>"},
            "limits": {"memory": "<<.Values.memory>>"},
        }
    for volume in pod["volumes"]:
        if volume["name"] == "models":
            volume["persistentVolumeClaim"]["claimName"] = CLAIM
    return found


def _memory(argument: str) -> str:
    flag, _, _ = argument.partition("=")
    return f"{flag}=<<.Values.kvCacheMemory>>" if flag == "--kv-cache-memory-bytes" else argument
