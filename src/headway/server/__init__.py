"""The HTTP side: OpenAI's API over an AsyncEngine."""

from headway.server.app import Apps, create_apps
from headway.server.entrance import Entrance
from headway.server.gate import Gate
from headway.server.limits import Timeouts
from headway.server.listeners import Listeners, listen
from headway.server.loading import Loading
from headway.server.serve import Site, run, serve

__all__ = [
    "Apps",
    "Entrance",
    "Gate",
    "Listeners",
    "Loading",
    "Site",
    "Timeouts",
    "create_apps",
    "listen",
    "run",
    "serve",
]
