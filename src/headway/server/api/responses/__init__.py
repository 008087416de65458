"""/v1/responses, over the path of chat: the body becomes a conversation, the answer items.

Must not generate, template, admit or check anything itself. In reading order:

    route.py       the routes and their endpoint
    form.py        the answer as a response object, or as the events of a stream
    items.py       the items of an answer: reasoning, a message, tool calls
    text_tokens.py  which tokens of a reply are those of its message
    background.py  responses that nobody waits for: started, read again, cancelled, deleted
"""
