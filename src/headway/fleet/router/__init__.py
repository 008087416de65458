"""One router for several frontends, in a process of its own.

Decides for all frontends which engine gets a request and when, by the Router that a frontend alone
has. Tokens never pass it: frontends keep their links to the engines. Its state is soft. In reading
order:

    structs.py    the base class of messages
    messages.py   what frontends and a router tell each other
    wire.py       the frames that carry it, and their bounds
    frontends.py  FleetRouter: the frontends of a router, and one Router for all of them
    quotas.py     FleetMeters and SharedQuotas: quotas over all frontends
    process.py    RouterListener: the router's side of all connections
    shared.py     SharedRouter: what a frontend has in place of a Router
    recorded.py   RecordedSharedRouter: one whose calls are recorded
    link.py       RouterLinks: connects a frontend to its routers, and uses one of them
    simulated.py  SharedFrontends: frontends and a router process on a virtual clock
"""
