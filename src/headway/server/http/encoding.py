"""JSON encoding: one encoder for whole answers and for stream chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

to_json = msgspec.json.Encoder().encode


class JsonResponse(Response):
    """A whole answer."""

    media_type = "application/json"

    def __init__(
        self, content: Any, status_code: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(to_json(content), status_code, headers)
