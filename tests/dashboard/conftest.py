"""Apps over scripted engines, as in the tests of the server."""

from tests.server.conftest import local

__all__ = ["local"]
