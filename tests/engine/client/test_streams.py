"""What a live request has to say to its next engine."""

from __future__ import annotations

from headway.core.events import TokensEmitted
from headway.core.params import SamplingParams
from headway.engine.client.streams import RequestStream
from headway.engine.process.messages import AddRequest
from headway.text import Tokenizer


def test_the_size_of_a_request_is_that_of_its_commands(tokenizer: Tokenizer) -> None:
    command = AddRequest("a", [65, 66, 67], SamplingParams(max_tokens=9, n=3), 7, 5.0)
    stream = RequestStream(command, tokenizer)
    assert stream.num_tokens_to_send == sum(len(one.token_ids) for one in stream.commands(6.0)) == 3
    for name, sample in stream.samples.items():
        sample.push(TokensEmitted(name, (65, 66), None))
    stream.lose_engine(7.0)
    assert stream.num_tokens_to_send == 15, "a prompt and two tokens for each sample"
    assert sum(len(one.token_ids) for one in stream.commands(8.0)) == 15
