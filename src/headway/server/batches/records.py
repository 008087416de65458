"""Files and batches as records, and as the objects of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

INPUT_PURPOSE = "batch"
OUTPUT_PURPOSE = "batch_output"
OPEN_STATUSES = ("validating", "in_progress", "finalizing", "cancelling")
"""Statuses of batches that have not ended."""


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a tenant."""

    id: str
    tenant: str
    purpose: str
    filename: str
    num_bytes: int
    created_at: int
    expires_at: int

    def as_object(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with an input file; `line` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class RequestCounts(msgspec.Struct, frozen=True):
    """Requests of a batch: all, answered, and failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0


NO_COUNTS = RequestCounts()


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of a tenant."""

    id: str
    tenant: str
    gateway: str | None = None
    """The gateway that named the tenant, if the tenant is in no file."""
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    """When the completion window ends."""
    output_id: str
    """Id of the output file, also before there is one."""
    error_id: str
    output_keep_s: int
    """Seconds that output files are kept."""
    metadata: Mapping[str, str] | None = None
    status: str = "validating"
    times: Mapping[str, int] = {}
    """When a status was reached, by the name of its field."""
    counts: RequestCounts = NO_COUNTS
    errors: tuple[LineError, ...] = ()

    @property
    def is_open(self) -> bool:
        return self.status in OPEN_STATUSES

    def become(self, status: str, now: float, **changes: Any) -> BatchRecord:
        """Return the record with another status."""
        times = {**self.times, f"{status}_at": int(now)}
        return msgspec.structs.replace(self, status=status, times=times, **changes)

    def with_counts(self, counts: RequestCounts) -> BatchRecord:
        return msgspec.structs.replace(self, counts=counts)

    def as_object(self) -> dict[str, Any]:
        errors = None
        if self.errors:
            errors = {"object": "list", "data": [msgspec.to_builtins(one) for one in self.errors]}
        has_ended = not self.is_open
        names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling")
        times = {f"{name}_at": self.times.get(f"{name}_at") for name in (*names, "cancelled")}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_id if has_ended and self.counts.completed else None,
            "error_file_id": self.error_id if has_ended and self.counts.failed else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **times,
            "request_counts": msgspec.to_builtins(self.counts),
            "metadata": self.metadata,
        }
