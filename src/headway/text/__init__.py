"""Text to tokens and back: tokenizer, chat template, incremental detokenizer, stop strings."""

from headway.text.chat_template import ChatTemplate
from headway.text.detokenizer import Detokenizer
from headway.text.output import OutputText
from headway.text.stops import StopStrings, TextDelta
from headway.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "OutputText",
    "StopStrings",
    "TextDelta",
    "Tokenizer",
]
