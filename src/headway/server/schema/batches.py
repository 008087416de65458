"""The body of POST /v1/batches."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from headway.errors import InvalidRequestError
from headway.server.schema.fields import Fields, RequestLimits

MAX_METADATA = 16
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
MIN_WINDOW_S, MAX_WINDOW_S = 1, 7 * 86_400
WINDOW = r"^[1-9][0-9]{0,5}[smhd]$"


class ExpiresAfter(Fields):
    """How long the output files are kept."""

    anchor: str
    seconds: int


class BatchRequest(Fields):
    """A batch: the requests in a file, all of one endpoint."""

    input_file_id: Annotated[str, Field(min_length=1, max_length=100)]
    endpoint: str
    completion_window: Annotated[str, Field(pattern=WINDOW)]
    metadata: (
        Annotated[
            dict[
                Annotated[str, Field(min_length=1, max_length=64)],
                Annotated[str, Field(max_length=512)],
            ],
            Field(max_length=MAX_METADATA),
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None

    @property
    def window_s(self) -> int:
        """Seconds of the completion window."""
        return int(self.completion_window[:-1]) * UNITS_S[self.completion_window[-1]]

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        is_valid = re.fullmatch(WINDOW.strip("^$"), self.completion_window) is not None
        if not is_valid or not MIN_WINDOW_S <= self.window_s <= MAX_WINDOW_S:
            raise InvalidRequestError(
                'completion_window must be a time such as "24h", "90m" or "30s", at most 7 days',
                "completion_window",
            )
