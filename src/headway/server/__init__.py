"""The HTTP side: OpenAI's API over an AsyncEngine."""

from headway.server.app import Apps, create_apps
from headway.server.gate import Gate
from headway.server.serve import Listeners, Site, listen, run, serve

__all__ = ["Apps", "Gate", "Listeners", "Site", "create_apps", "listen", "run", "serve"]
