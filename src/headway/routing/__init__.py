"""The router: which engine of a fleet gets a request, and when.

Owns the assignment of requests to engines, what the router knows of each engine, and the fair order
over the fleet. Pure Python on headway.core, with explicit times: the frontend and the simulator use
the same code. Must not know links, threads or asyncio. In reading order:

    requests.py  one request in the router
    prefixes.py  which engines have which prefixes
    engines.py   one engine: speed, requests, predicted TTFT
    loads.py     engines in order of their load
    rules.py     how an engine is chosen
    shares.py    fair shares over the fleet
    autoscale.py  how many engines the work needs
    router.py    Router: assigned early, sent late
"""

from headway.routing.autoscale import FleetDemand
from headway.routing.engines import EngineLimits
from headway.routing.requests import Reason
from headway.routing.router import AllowedEngines, FrontendLoad, NoEngineInTime, Router, Sending
from headway.routing.rules import RULES, PredictedTtft, Rule

__all__ = [
    "RULES",
    "AllowedEngines",
    "EngineLimits",
    "FleetDemand",
    "FrontendLoad",
    "NoEngineInTime",
    "PredictedTtft",
    "Reason",
    "Router",
    "Rule",
    "Sending",
]
