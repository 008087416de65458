"""The HTTP side: OpenAI's API over an AsyncEngine."""

from headway.server.app import create_app
from headway.server.serve import listen, run, serve

__all__ = ["create_app", "listen", "run", "serve"]
