"""Engines on the network, their frontends, one router over them, and who starts them all.

A frontend is an API process without an engine of its own. An engine listens, and frontends connect.
Must not know HTTP; the scheduler and the streams are in core and engine. In reading order:

    network/    what all processes of a fleet share: messages, keys, connections
    engines/    the engine's side of its connections to frontends
    frontends/  the frontend's side, and how it finds engines
    router/     one router for several frontends
    manage/     the manager of a fleet and its hosts
    ray/        places hosts by Ray; the only folder that imports Ray
"""
