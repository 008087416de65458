"""The engine process: takes commands from a socket, runs steps, sends events back.

Must not import client or supervise. `headway.engine_main` is its entry point. In reading order:

    messages.py  commands and reports, as msgspec structs
    journal.py   the request ids of the step under way, in a file that outlives the process
    tenant_turns.py  work that waits, taken from its tenants in turn
    grammar_queue.py  requests that wait until their grammar is compiled
    loop.py      EngineLoop: commands in, steps, reports out
"""
