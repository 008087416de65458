"""POST /v1/responses, over the path of chat: the body becomes a conversation, the answer items.

Must not generate, template, admit or check anything itself. In reading order:

    route.py  the route and its endpoint
    form.py   the answer as a response object, or as the events of a stream
    items.py  the items of an answer: reasoning, a message, tool calls
"""
