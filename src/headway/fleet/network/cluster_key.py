"""The key of a cluster, and the encryption that follows from it.

One secret in a file, on every machine of the cluster. Both key pairs of CURVE follow from it: that
of the engines and that of the frontends. So an engine proves to a frontend that it has the secret,
and the other way round, and everything between them is encrypted.
"""

from __future__ import annotations

import os
import secrets
import stat
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from headway.errors import ConfigError

MIN_SECRET_CHARS = 32
MAX_FILE_BYTES = 4096
ZAP_DOMAIN = b"headway"
_FILE_MODE = 0o600


@dataclass(frozen=True, slots=True)
class KeyPair:
    """The two keys of one side, in Z85."""

    public: bytes
    secret: bytes


@dataclass(frozen=True, slots=True, repr=False)
class ClusterKey:
    """The key pairs of a cluster."""

    engine: KeyPair
    frontend: KeyPair

    @classmethod
    def of(cls, secret: str) -> ClusterKey:
        """Return the key pairs that follow from a secret."""
        return cls(_derive(secret, b"headway engine"), _derive(secret, b"headway frontend"))

    @classmethod
    def read(cls, path: Path) -> ClusterKey:
        """Read the file of a cluster key; raise ConfigError if it cannot be used."""
        try:
            mode = path.stat().st_mode
            with path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ConfigError(
                f"cannot read --cluster-key-file {path}: {error.strerror}; make one with: "
                "headway keys cluster FILE"
            ) from error
        if mode & stat.S_IROTH:
            raise ConfigError(
                f"every user of this machine can read --cluster-key-file {path}: chmod 600 {path} "
                "(in Kubernetes, defaultMode: 0400)"
            )
        secret = content.decode("ascii", "replace").strip()
        if not MIN_SECRET_CHARS <= len(secret) <= MAX_FILE_BYTES or not secret.isascii():
            raise ConfigError(
                f"--cluster-key-file {path} must hold one secret of {MIN_SECRET_CHARS} to "
                f"{MAX_FILE_BYTES} ASCII characters; make one with: headway keys cluster FILE"
            )
        return cls.of(secret)


def write_cluster_key(path: Path) -> None:
    """Write a new key to a new file that only its owner can read."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE)
    except OSError as error:
        raise ConfigError(f"cannot make {path}: {error.strerror}") from error
    with os.fdopen(file, "w") as out:
        out.write(secrets.token_hex(32) + "\n")


def secure_engine(socket: zmq.Socket[Any], key: ClusterKey) -> None:
    """Have a socket of an engine encrypt, and prove that it has the key."""
    socket.curve_server = True
    # Without an authenticator that answers, nobody is let in.
    socket.zap_domain, socket.zap_enforce_domain = ZAP_DOMAIN, True
    socket.curve_publickey, socket.curve_secretkey = key.engine.public, key.engine.secret


def secure_frontend(socket: zmq.Socket[Any], key: ClusterKey) -> None:
    """Have a socket of a frontend encrypt, and accept only engines with the key."""
    socket.curve_publickey, socket.curve_secretkey = key.frontend.public, key.frontend.secret
    socket.curve_serverkey = key.engine.public


class FrontendKeys:
    """Tells the authenticator of an engine which frontends may connect."""

    def __init__(self, key: ClusterKey) -> None:
        self._public = key.frontend.public

    def callback(self, _domain: str, public: bytes) -> bool:
        return secrets.compare_digest(public, self._public)


def _derive(secret: str, purpose: bytes) -> KeyPair:
    digest = blake2b(secret.encode(), digest_size=32, person=purpose).digest()
    encoded = z85.encode(digest)
    return KeyPair(zmq.curve_public(encoded), encoded)
