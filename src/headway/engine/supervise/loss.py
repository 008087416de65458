"""What is known about the end of an engine process."""

from __future__ import annotations

from dataclasses import dataclass

NUM_CLEARING_TOKENS = 8
"""Tokens in one engine after which a request is no longer a suspect."""


@dataclass(frozen=True, slots=True)
class EngineLoss:
    """The evidence that a lost engine leaves about its requests."""

    step_ids: frozenset[str] = frozenset()
    """Samples in the step that did not end."""
    has_failed: bool = False
    """Whether a request may be the cause although no step has it: an exception between steps."""
    is_shared: bool = False
    """Whether a request of another frontend may be the cause."""
    held_ids: frozenset[str] = frozenset()
    """Samples that were sent and that the engine process never had."""
