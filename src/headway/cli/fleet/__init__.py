"""Engines and frontends of a fleet: `headway engine`, `frontend`, `router` and `fleet`.

In reading order:

    engine.py    an engine that waits for frontends
    frontend.py  the API over engines on the network
    router.py    decides for several frontends
    fleet.py     runs engines and frontends from one file
"""
