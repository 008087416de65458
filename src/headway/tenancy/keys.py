"""API keys: how they are made, hashed and written down, and what their owners may be called.

Only digests are kept. A key is 32 random bytes, so a plain hash of it cannot be searched for; a
password would need a slow one.
"""

from __future__ import annotations

import hashlib
import re
import secrets

PREFIX = "hw-"
NUM_RANDOM_BYTES = 32
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
NAME_RULE = "1 to 64 letters, digits, dots, dashes or underscores"
WRITTEN_RULE = "sha256:<64 hex digits>"
_WRITTEN = re.compile(r"sha256:([0-9a-f]{64})")


def make_key() -> str:
    """A fresh key, to be shown once and never stored."""
    return PREFIX + secrets.token_urlsafe(NUM_RANDOM_BYTES)


def digest_of(secret: bytes) -> bytes:
    """Digests have one length, whatever the key's."""
    return hashlib.sha256(secret).digest()


def digest_of_text(secret: str) -> bytes:
    """The digest of a key as somebody typed it."""
    return digest_of(secret.encode("utf-8", "surrogateescape"))


def write_digest(digest: bytes) -> str:
    """The digest as files hold it."""
    return f"sha256:{digest.hex()}"


def read_digest(text: str) -> bytes | None:
    """The digest a file holds, or None if that is not what it holds."""
    match = _WRITTEN.fullmatch(text)
    return bytes.fromhex(match[1]) if match else None
