"""The engine's side of its connections to frontends.

Must not know how frontends find or choose engines. In reading order:

    numerics.py     which engines compute the same tokens
    sessions.py     the frontends of an engine, and the requests of each
    orphans.py      requests that outlive their frontend
    trials.py       requests on trial, one at a time for all frontends
    listener.py     EngineListener: the engine's side of all connections
    engine_host.py  runs a supervised engine behind a listener
"""
