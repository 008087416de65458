"""The engine as the rest of Headway uses it: asynchronous in a process of its own, or offline.

    client/      the API process's side: AsyncEngine and its streams
    process/     the engine process: loop, messages, journal
    supervise/   starting, watching and replacing the engine process
    offline.py   the engine in the caller's process, for LLM.generate

Knows nothing of HTTP; must not import server, bench or cli.
"""
