"""The endpoints, and what they share.

Must not import app or serve. In reading order:

    chat.py          POST /v1/chat/completions
    completions.py   POST /v1/completions
    responses/       /v1/responses
    messages/        POST /v1/messages, /v1/messages/count_tokens
    embeddings.py    POST /v1/embeddings
    generate/        from an HTTP request to a generation, and to its answer
    streams.py       GET /v1/streams: the rest of a stream
    tokenize.py      /tokenize, /detokenize, /tokenizer_info
    models.py        /v1/models
    batches/         /v1/files, /v1/batches
    operate/         health, status, explanations, cancelling
    openapi/         /openapi.json
"""
