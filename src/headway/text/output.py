"""Text of one sample: token ids in, text that is safe to send out.

Joins detokenizer and stop strings, so that the offline and the served path treat text alike. Token
counts, end ids and finish reasons are not handled here.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.text.detokenizer import Detokenizer
from headway.text.stops import StopStrings, TextDelta


class OutputText:
    """Push the sampled ids step by step; after a delta with a `stop` the text is complete.

    Text of the first `min_tokens` ids never matches a stop string.
    """

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings, min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._num_exempt = min_tokens

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        exempt = ""
        if self._num_exempt:
            exempt = self._detokenizer.push(token_ids[: self._num_exempt])
            num_exempt = min(self._num_exempt, len(token_ids))
            self._num_exempt -= num_exempt
            token_ids = token_ids[num_exempt:]
        delta = self._stops.feed(self._detokenizer.push(token_ids))
        return TextDelta(exempt + delta.text, delta.stop)

    def finish(self) -> TextDelta:
        """Return the buffered text; its last characters may still complete a stop string."""
        last = self._stops.feed(self._detokenizer.finish())
        if last.stop is not None:
            return last
        return TextDelta(last.text + self._stops.finish().text)

    def check(self) -> None:
        self._stops.check()
