"""A frontend's router, shared with others or not, whose calls are recorded."""

from __future__ import annotations

from headway.fleet.router.shared import SharedRouter
from headway.record.router.recorded import RecordedRouter


class RecordedSharedRouter(SharedRouter, RecordedRouter):
    """A SharedRouter that records what it decides, and what a router process decided for it."""
