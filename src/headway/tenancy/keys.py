"""API keys: how they are made, hashed and written, and the rule for names.

Only digests are stored. A key is 32 random bytes, so its plain hash cannot be reversed by search; a
password would need a slow hash.
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
    """Return a new key, to be shown once and never stored."""
    return PREFIX + secrets.token_urlsafe(NUM_RANDOM_BYTES)


def digest_of(secret: bytes) -> bytes:
    """Return the digest of a key; digests have one length, whatever the key's."""
    return hashlib.sha256(secret).digest()


def digest_of_text(secret: str) -> bytes:
    """Return the digest of a key that a user typed."""
    return digest_of(secret.encode("utf-8", "surrogateescape"))


def write_digest(digest: bytes) -> str:
    """Return the digest in the form of the files."""
    return f"sha256:{digest.hex()}"


def read_digest(text: str) -> bytes | None:
    """Return the digest in a text of the files' form, or None."""
    match = _WRITTEN.fullmatch(text)
    return bytes.fromhex(match[1]) if match else None
