"""Recordings of a router, and their replay in a fresh one.

The router reads no clock and draws no random number, so its decisions follow from its rule, the
calls into it and what its frontend answers about engines. In reading order:

    entries.py   what a recording holds, as msgspec structs
    encoder.py   entries from router calls; salted hashes in place of tokens
    recorded.py  RecordedRouter: a router whose calls are recorded
    replay.py    replays a recording and finds the first decision that differs
"""
