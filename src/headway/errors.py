"""Every exception Headway raises on purpose.

HeadwayError
├── InvalidRequestError     the caller's request is wrong; `param` names the field (HTTP 400)
│   └── NeverFitsError      well formed, but larger than this server can ever hold (HTTP 400)
├── OverloadedError         no room now; `retry_after_s` says when to come back (HTTP 503)
│   ├── DeadlineError       it could not be answered within its targets (HTTP 503)
│   └── TenantLimitError    the caller has its share already (HTTP 429)
│       └── QuotaError      the caller's tenant has used up a quota; `quota` names it (HTTP 429)
├── QuarantinedError        the request took the engine down twice (HTTP 500)
├── SlowReaderError         the client does not read its answer; the connection is closed
├── ConfigError             a flag, environment variable or config file is wrong
├── LedgerError             the ledger cannot be read or written now
├── ModelLoadError          weights, tokenizer or template cannot be read
└── EngineError             the engine process failed
    ├── EngineDeadError     it is gone; nothing more will come from it
    ├── EngineFailedError   it said itself that it failed
    ├── EngineHungError     it is there, and does nothing
    ├── ReportError         the API process cannot handle what it reports
    └── EngineStalledError  work is present and no step makes progress: a bug, said aloud

Errors are raised where they happen and translated into HTTP answers in one place, the server.
"""

from __future__ import annotations


class HeadwayError(Exception):
    """Root of the tree: catching it catches everything Headway raises on purpose."""


class InvalidRequestError(HeadwayError, ValueError):
    """A request field has a value that is refused; the message says which values are accepted."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class NeverFitsError(InvalidRequestError):
    """The request needs more than an empty server has."""


class OverloadedError(HeadwayError):
    """The server has as much work waiting as it will take on."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineError(OverloadedError):
    """What the request was to be promised cannot be kept, or only by breaking what others were."""


class TenantLimitError(OverloadedError):
    """The caller has as much work waiting as one caller may have."""


class QuotaError(TenantLimitError):
    """The caller's tenant has used what it may for now."""

    def __init__(self, message: str, retry_after_s: int, quota: str) -> None:
        super().__init__(message, retry_after_s)
        self.quota = quota


class QuarantinedError(HeadwayError):
    """The engine went down twice with this request; it is not tried again."""


class SlowReaderError(HeadwayError):
    """More output is waiting for the client than is kept for one."""


class ConfigError(HeadwayError, ValueError):
    """A setting is unknown, malformed or contradicts another."""


class LedgerError(HeadwayError):
    """The database of the ledger does not answer, or not as it should."""


class ModelLoadError(HeadwayError):
    """A model cannot be loaded; the message says what was looked for and where."""


class EngineError(HeadwayError):
    """The engine process failed."""


class EngineDeadError(EngineError):
    """The engine process is gone."""


class EngineFailedError(EngineError):
    """The engine process met an exception, said so and ended."""


class EngineHungError(EngineError):
    """The engine process has work and finishes no step."""


class ReportError(EngineError):
    """Handling a report of the engine raised an exception in the API process."""


class EngineStalledError(EngineError):
    """Work is present but step after step schedules nothing."""
