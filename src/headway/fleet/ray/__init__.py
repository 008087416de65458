"""Places the hosts of a fleet by Ray. The only folder that imports Ray.

Ray decides on which machine a host runs, and starts it again when it is lost. It never carries a
request, a token or a key. Only `placer.py` runs outside of Ray's own processes, in a child of the
manager; engines and frontends never join a Ray cluster. In reading order:

    actor.py   a host as an actor
    placer.py  the child of the manager that starts and ends these actors
    serve_app.py  a fleet as a Ray Serve application
"""
