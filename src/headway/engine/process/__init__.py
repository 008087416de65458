"""The engine process: takes commands from a socket, runs steps, sends events back.

Must not import client or supervise. `headway.engine_main` is its entry. In reading order:

    messages.py  commands and reports, as msgspec structs
    journal.py   which requests are in the step under way, written where it outlives the process
    loop.py      EngineLoop
"""
