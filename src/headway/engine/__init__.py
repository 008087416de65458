"""The engine behind its two interfaces: AsyncEngine and OfflineEngine.

Must not know HTTP; must not import server, bench or cli. In reading order:

    offline.py   the engine in the caller's process, for LLM.generate
    process/     the engine process: messages, journal, loop
    supervise/   starting, watching and replacing the engine process
    client/      the API process's side: AsyncEngine and its streams
"""
