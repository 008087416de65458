"""Request and response bodies of the API, as pydantic models.

Every field is honoured or refused. Must not import api, http or the engine. In reading order:

    fields.py       the base of all bodies; unsupported fields
    structured.py   structured output: response_format, structured_outputs
    request.py      fields that chat and completions share, parsing, limits
    chat.py         the body of /v1/chat/completions
    completions.py  the body of /v1/completions
    embeddings.py   the body of /v1/embeddings
    answers.py      response bodies, for the OpenAPI document
"""
