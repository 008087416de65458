"""Answers in the form of chat and completions: choices, in an envelope or in chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from headway.server.api.generate.answer import ChoicePart, EventStamp, GenerationJob
from headway.server.api.generate.generation import Generation
from headway.server.http import sse
from headway.server.http.errors import ErrorResponse

FINGERPRINT_CHARS = 16


class ChoiceFormat(Protocol):
    """How one endpoint writes choices."""

    @property
    def object_names(self) -> tuple[str, str]:
        """The `object` field of a whole answer, and of a chunk."""
        ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the chunk that a stream sends before a choice's first text, if any."""
        ...

    def chunk(self, piece: ChoicePart) -> dict[str, Any]: ...

    def whole(self, pieces: Sequence[ChoicePart]) -> dict[str, Any]:
        """Return the fields of a whole answer that hold its choices and describe its prompt."""
        ...


class ChunkForm:
    """Writes one answer; chunks have the same envelope as a whole answer."""

    headers: Mapping[str, str] = {}

    def __init__(
        self, job: GenerationJob, generation: Generation, choice_format: ChoiceFormat
    ) -> None:
        self._job = job
        self._generation = generation
        self._format = choice_format

    def begin(self, index: int, stamp: EventStamp) -> bytes:
        opening = self._format.opening(index)
        return b"" if opening is None else self._chunk(opening, stamp, **self._prompt_ids())

    def write(self, piece: ChoicePart, stamp: EventStamp) -> bytes:
        return self._chunk(self._format.chunk(piece), stamp)

    def end(self, stamp: EventStamp, error: ErrorResponse | None = None) -> bytes:
        if error is not None:
            return sse.event(error.body()) + sse.DONE
        if not self._job.options.includes_usage:
            return sse.DONE
        envelope = self._envelope(self._format.object_names[1])
        chunk = {**envelope, "choices": [], "usage": self._generation.usage()}
        return sse.event(chunk, stamp.event_id) + sse.DONE

    def whole(self, pieces: Sequence[ChoicePart], numerics: Sequence[str]) -> dict[str, Any]:
        return {
            **self._envelope(self._format.object_names[0], *numerics),
            **self._prompt_ids(),
            **self._format.whole(pieces),
            "usage": self._generation.usage(),
        }

    def _prompt_ids(self) -> dict[str, Any]:
        """Return the ids of the only prompt as a field, if they are asked for."""
        prompts = self._job.spec.prompts
        is_wanted = self._job.options.returns_token_ids and len(prompts) == 1
        return {"prompt_token_ids": list(prompts[0])} if is_wanted else {}

    def _chunk(self, choice: dict[str, Any], stamp: EventStamp, **fields: Any) -> bytes:
        envelope = self._envelope(self._format.object_names[1], stamp.numerics)
        chunk = {**envelope, **fields, "choices": [choice]}
        options = self._job.options
        if options.includes_usage:
            chunk["usage"] = self._generation.usage() if options.has_continuous_usage else None
        return sse.event(chunk, stamp.event_id)

    def _envelope(self, object_name: str, *numerics: str) -> dict[str, Any]:
        envelope: dict[str, Any] = {
            "id": self._generation.id,
            "object": object_name,
            "created": self._job.created,
            "model": self._job.model,
        }
        envelope |= self._job.options.envelope()
        # As in the OpenAI API: the same seed gives the same tokens while this stays the same.
        fingerprints = [f"fp_{one[:FINGERPRINT_CHARS]}" for one in numerics if one]
        if fingerprints:
            envelope["system_fingerprint"] = "+".join(fingerprints)
        return envelope
