"""Request and response bodies of the API, as pydantic models.

Every field is honoured or refused. Must not import api, http or the engine. In reading order:

    fields.py       the base of all bodies; unsupported fields
    structured.py   structured output: response_format, structured_outputs
    tools.py        tools, tool_choice, past calls
    sampling.py     sampling fields that chat, completions and responses share
    request.py      fields that chat and completions share, parsing, limits
    chat.py         the body of /v1/chat/completions
    completions.py  the body of /v1/completions
    adapted.py      bodies of other APIs that are read as conversations
    conversation.py  a conversation from the items of another API
    responses.py    the body of /v1/responses
    response_items.py  its items
    messages.py     the bodies of /v1/messages
    embeddings.py   the body of /v1/embeddings
    answers.py      response bodies, for the OpenAPI document
    other_answers.py  those of /v1/responses and /v1/messages
"""
