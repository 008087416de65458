"""The parameters of a URL: each is known and there once, or the request is refused."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request

from headway.errors import InvalidRequestError

_FLAGS = {"true": True, "false": False}


def read_query(request: Request, *known: str) -> dict[str, str]:
    """Return the parameters of the URL; refuse one that is unknown or there twice."""
    items = request.query_params.multi_items()
    for name, _ in items:
        if name not in known:
            raise InvalidRequestError(f"unknown parameter: {name[:100]}", name[:100])
    if len({name for name, _ in items}) < len(items):
        raise InvalidRequestError("a parameter is there twice")
    return dict(items)


def read_flag(query: Mapping[str, str], name: str) -> bool:
    """Return a parameter that is true or false; false if it is not there."""
    text = query.get(name, "false")
    if text not in _FLAGS:
        raise InvalidRequestError(f"{name} must be true or false", name)
    return _FLAGS[text]
