"""The settings, and which of them differ from their defaults; secrets are left out."""

from __future__ import annotations

from dataclasses import fields
from typing import Any
from urllib.parse import urlsplit

from headway.config import Config

SECRETS = frozenset({"api_key", "otlp_header"})
URLS = frozenset({"ledger_url", "otlp_endpoint"})
"""Settings that may have a password in a URL."""


def setting_rows(config: Config) -> list[dict[str, Any]]:
    """Return one row per setting: section, name, value, default, and what it is for."""
    rows: list[dict[str, Any]] = []
    for section in fields(config):
        values = getattr(config, section.name)
        for spec in fields(values):
            value = getattr(values, spec.name)
            rows.append(
                {
                    "section": section.name,
                    "name": spec.name,
                    "value": _shown(spec.name, value),
                    "default": _shown(spec.name, spec.default),
                    "differs": value != spec.default,
                    "about": spec.metadata["about"],
                }
            )
    return rows


def _shown(name: str, value: Any) -> str:
    if name in SECRETS:
        return f"{len(value)} set" if value else ""
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    text = str(value)
    return _without_password(text) if name in URLS else text


def _without_password(url: str) -> str:
    """Return a URL without its user, password and query, which may hold a password too."""
    parts = urlsplit(url)
    if not parts.netloc and not parts.query:
        return url
    netloc = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=netloc, query="", fragment="").geturl()
