"""Text to tokens and back, chat templates, stop strings and grammars.

In reading order:

    tokenizer.py         Tokenizer: text to token ids and back
    loaded.py            what a model format says about its tokenizer
    folder_tokenizer.py  tokenizer of a model folder
    gguf_tokenizer.py    tokenizer of a GGUF file
    token_bytes.py       bytes of a token
    detokenizer.py       token ids to text, incrementally
    stops.py             stop strings
    output.py            text of one sample: detokenizer and stop strings
    grammar.py           grammars of structured output, as text
    matchers.py          compiled grammars: which tokens may come next
    reply.py             a reply as its client reads it: reasoning, text, tool calls
    reasoning.py         reasoning between think tags
    thinking.py          bounds reasoning by a number of tokens
    tools/               tool calls: forms, grammars, parsers
    chat_template.py     chat messages to a prompt
    sandbox.py           bounded Jinja sandbox for templates
"""

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
