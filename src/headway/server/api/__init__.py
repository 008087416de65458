"""The endpoints, one file each, and what they share.

Must not import app or serve. In reading order:

    chat.py          POST /v1/chat/completions
    completions.py   POST /v1/completions
    responses/       /v1/responses
    messages/        POST /v1/messages, /v1/messages/count_tokens
    embeddings.py    POST /v1/embeddings
    endpoint.py      from an HTTP request to a generation, once per Idempotency-Key
    generation.py    the engine requests behind one HTTP request
    answer.py        whole and streamed responses
    chunks.py        the form of both: choices, in an envelope or in chunks
    streams.py       GET /v1/streams: the rest of a stream
    adopted.py       streams of other frontends that this one continues
    logprobs.py      log-probabilities in OpenAI's forms and vLLM's
    tokenize.py      /tokenize, /detokenize, /tokenizer_info
    models.py        /v1/models
    files.py         /v1/files
    batches.py       /v1/batches
    requests.py      cancels a request
    explanations.py  why a request took as long as it did
    health.py        health probes
    status.py        metrics, version and load
    openapi.py       /openapi.json
    openapi_document.py  the OpenAPI document
"""
