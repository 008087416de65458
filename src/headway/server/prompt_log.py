"""The log of prompts, for those who ask for it: without what the operator's patterns match.

There is no way to log prompts without a file of patterns. The patterns see more of a prompt than
the log shows, so that what they match is not shown in part.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path

from headway.errors import ConfigError
from headway.text import Tokenizer

logger = logging.getLogger("headway.prompts")

MAX_PATTERNS = 256
MAX_PATTERN_CHARS = 1000
MAX_TOKENS = 2048
"""Most tokens of a prompt that are turned into text."""
MAX_CHARS = 2000
"""Most characters of a prompt that are logged."""
REDACTED = "[redacted]"


class PromptLog:
    """Logs the beginning of each prompt, redacted."""

    def __init__(self, patterns: Sequence[re.Pattern[str]]) -> None:
        self._patterns = patterns

    def redact(self, text: str) -> str:
        """Return the text as it may be logged."""
        for pattern in self._patterns:
            text = pattern.sub(REDACTED, text)
        return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}..."

    def write(
        self, request_id: str, tenant: str, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer
    ) -> None:
        """Log the prompts of a request as the model gets them, a line each."""
        for number, token_ids in enumerate(prompts):
            text = tokenizer.decode(token_ids[:MAX_TOKENS], skip_special_tokens=False)
            fields = {
                "request_id": request_id,
                "tenant": tenant,
                "prompt_index": number,
                "num_tokens": len(token_ids),
                "prompt": self.redact(text),
            }
            # As JSON text: a prompt cannot begin a line of its own.
            told = " ".join(json.dumps(value) for value in fields.values())
            logger.info("%s", told, extra={"fields": fields})


def open_prompt_log(path: str | None) -> PromptLog | None:
    """Return the log with the patterns of a file; None without one."""
    if path is None:
        return None
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"log_prompts: cannot read the patterns in {path}: {error}") from error
    patterns: list[re.Pattern[str]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        if len(line) > MAX_PATTERN_CHARS or len(patterns) == MAX_PATTERNS:
            raise ConfigError(
                f"log_prompts: line {number} of {path} is beyond {MAX_PATTERNS} patterns of "
                f"{MAX_PATTERN_CHARS} characters"
            )
        try:
            patterns.append(re.compile(line))
        except re.error as error:
            raise ConfigError(f"log_prompts: line {number} of {path}: {error}") from error
    return PromptLog(patterns)
