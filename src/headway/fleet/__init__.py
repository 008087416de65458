"""Engines on the network: links between frontends and engines, discovery.

A frontend is an API process without an engine of its own. An engine listens, and frontends connect.
Must not know HTTP; the scheduler and the streams are in core and engine. In reading order:

    wire.py         the messages of a connection, and their bounds
    cluster_key.py  the key of a cluster, and the encryption that follows from it
    endpoints.py    addresses, and who may use them without a key
    clocks.py       times of another machine, as times of this one
    live.py         requests of one connection: their attempts, and the credit
    checks.py       checks every request that a frontend sends
    numerics.py     which engines compute the same tokens
    sessions.py     the frontends of an engine, and the requests of each
    orphans.py      requests that outlive their frontend
    server_socket.py  the socket on which engines, routers and managers wait
    listener.py     EngineListener: the engine's side of all connections
    connection.py   one connection of a frontend to an engine or a router
    link.py         NetworkLink: connects, connects again, and reports what happens
    discovery.py    which engines there are
    fleet_discovery.py  the same, from the manager of a fleet
    engine_host.py  runs a supervised engine behind a listener
    router/         one router for several frontends
    manage/         the manager of a fleet and its hosts
    ray/            places hosts by Ray; the only folder that imports Ray
"""
