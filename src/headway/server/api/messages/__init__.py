"""Anthropic's /v1/messages, over the path of chat: the body becomes a conversation.

Must not generate, template, admit or check anything itself. In reading order:

    route.py  the routes and their endpoint
    form.py   the answer as a message, or as the events of a stream
"""
