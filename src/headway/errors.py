"""Every exception that Headway raises on purpose.

HeadwayError
├── InvalidRequestError     a field of the request is wrong; `param` names the field (HTTP 400)
│   └── NeverFitsError      the request is larger than this server can ever hold (HTTP 400)
├── OverloadedError         the waiting queue is full; `retry_after_s` says when to retry (HTTP 503)
│   ├── DeadlineError       the request cannot meet its targets (HTTP 503)
│   └── TenantLimitError    the tenant has too many waiting requests (HTTP 429)
│       └── QuotaError      the tenant has used up a quota; `quota` names the quota (HTTP 429)
├── QuarantinedError        the request took the engine down twice (HTTP 500)
├── SlowReaderError         the client does not read its stream; the server closes the connection
├── ReaderReplacedError     another client has resumed the stream; the server closes the connection
├── ConfigError             a flag, environment variable or config file is wrong
├── LedgerError             the ledger cannot be read or written
├── TraceError              a trace cannot be fetched or written
├── RecordingError          a recording cannot be read
├── BatchStoreError         files and batches cannot be read or written (HTTP 503)
├── ModelLoadError          weights, tokenizer or template cannot be read
└── EngineError             the engine process failed
    ├── EngineDeadError     the engine process is gone
    ├── EngineFailedError   the engine process reported an exception and ended
    ├── EngineHungError     the engine process has work and finishes no step
    ├── ReportError         the API process failed while handling a report
    └── EngineStalledError  requests are present and no step schedules any of them: a bug

The server translates errors into HTTP responses in one place.
"""

from __future__ import annotations


class HeadwayError(Exception):
    """Base of all exceptions that Headway raises on purpose."""


class InvalidRequestError(HeadwayError, ValueError):
    """A request field has an invalid value.

    The message says which values are accepted.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class NeverFitsError(InvalidRequestError):
    """The request needs more than an empty server has."""


class OverloadedError(HeadwayError):
    """The waiting queue is full."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineError(OverloadedError):
    """The request cannot meet its targets beside the requests already admitted."""


class TenantLimitError(OverloadedError):
    """The tenant has as many waiting requests as one tenant may have."""


class QuotaError(TenantLimitError):
    """The tenant has used up a quota."""

    def __init__(self, message: str, retry_after_s: int, quota: str) -> None:
        super().__init__(message, retry_after_s)
        self.quota = quota


class QuarantinedError(HeadwayError):
    """The request took the engine down twice and is not tried again."""


class SlowReaderError(HeadwayError):
    """More output waits for the client than the server buffers."""


class ReaderReplacedError(HeadwayError):
    """The stream was resumed over another connection, which now gets its output."""


class ConfigError(HeadwayError, ValueError):
    """A setting is unknown, malformed or contradicts another."""


class LedgerError(HeadwayError):
    """The ledger database does not answer, or returned an error."""


class TraceError(HeadwayError):
    """A trace cannot be fetched from a server, or written."""


class RecordingError(HeadwayError):
    """A file is not a recording, is damaged, or has another format."""


class BatchStoreError(HeadwayError):
    """The store of files and batches does not answer, or returned an error."""


class ModelLoadError(HeadwayError):
    """A model cannot be loaded.

    The message says what was looked for, and where.
    """


class EngineError(HeadwayError):
    """The engine process failed."""


class EngineDeadError(EngineError):
    """The engine process is gone."""


class EngineFailedError(EngineError):
    """The engine process reported an exception and ended."""


class EngineHungError(EngineError):
    """The engine process has work and finishes no step."""


class ReportError(EngineError):
    """The API process failed while handling a report of the engine."""


class EngineStalledError(EngineError):
    """Requests are present, but step after step schedules nothing."""


class WireError(ValueError):
    """A message that is not part of the protocol."""
