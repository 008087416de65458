"""The protocol version names one form of the messages between frontends and engines."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec

from headway.fleet.network.wire import PROTOCOL_VERSION, EngineMessage, FrontendMessage

FORM = (8, "5c5ec07b5dae98fa")
"""Version and digest of the messages; whoever changes the messages raises PROTOCOL_VERSION."""


def test_the_version_is_raised_with_the_messages():
    _, components = msgspec.json.schema_components([FrontendMessage, EngineMessage])
    text = json.dumps(_without_descriptions(components), sort_keys=True)
    assert (PROTOCOL_VERSION, hashlib.sha256(text.encode()).hexdigest()[:16]) == FORM


def _without_descriptions(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _without_descriptions(part)
            for name, part in value.items()
            if name != "description"
        }
    return [_without_descriptions(part) for part in value] if isinstance(value, list) else value
