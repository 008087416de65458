"""What the endpoints that generate share.

endpoint.py    from an HTTP request to a generation, once per Idempotency-Key
generation.py  the engine requests behind one HTTP request
answer.py      whole and streamed responses
chunks.py      the form of both: choices, in an envelope or in chunks
adopted.py     streams of other frontends that this one continues
logprobs.py    log-probabilities in OpenAI's forms and vLLM's
"""
