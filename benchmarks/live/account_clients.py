"""Starts a server with many kinds of tenants, and clients that record their requests.

Used by benchmarks/live/accounts.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.support import proc_stats
from benchmarks.support.servers import RunningServer
from headway.tenancy.keys import digest_of_text, write_digest

TENANTS = {
    "gold": (0.30, "{keys: [%s], tier: gold}"),
    "silver": (0.20, "{keys: [%s], weight: 2}"),
    "plain": (0.15, "{keys: [%s]}"),
    "capped": (0.15, "{keys: [%s], quotas: {kv_share: 0.15}}"),
    "night": (0.20, "{keys: [%s], tier: night}"),
    "auditor": (0.0, "{keys: [%s], admin: true}"),
}
TIERS = "tiers: {gold: {weight: 4}, night: {spot: true}}"
SETTINGS = {
    "max_queue_wait_s": 3600,
    "max_queue_age_s": 3600,
    "max_num_queued_reqs": 100_000,
    "max_num_queued_tokens": 100_000_000,
}
MAX_NUM_SEQS = 64
"""As in the fake engine; so is the number of blocks: 256 of 16 tokens, 23,040 bytes each."""
FOR_MODEL = {
    "scheduling_policy": "fair",
    "max_num_seqs": MAX_NUM_SEQS,
    "prefill_cap": 256,
    "kv_cache_memory_bytes": 256 * 16 * 23_040,
}


@dataclass(slots=True)
class SentRequest:
    """One request, as its client saw it."""

    id: str
    tenant: str
    has_disconnected: bool = False
    ended_s: float | None = None
    error: str = ""


@dataclass(slots=True)
class TenantClients:
    """Clients of one server, each with the key of its tenant."""

    url: str
    secrets: Mapping[str, str]
    http: httpx.AsyncClient
    sent: list[SentRequest] = field(default_factory=list)

    async def complete(
        self, tenant: str, body: Mapping[str, Any], disconnects_s: float = 0.0
    ) -> SentRequest:
        """Stream an answer to its end, or disconnect after `disconnects_s`."""
        sent = SentRequest(f"account-{len(self.sent)}", tenant)
        self.sent.append(sent)
        began_at = time.monotonic()
        try:
            async with asyncio.timeout(disconnects_s or None):
                await self._stream(sent, body)
        except TimeoutError:
            sent.has_disconnected = True
        except httpx.HTTPError as error:
            sent.error = f"{type(error).__name__}: {error}"
        sent.ended_s = time.monotonic() - began_at
        return sent

    async def _stream(self, sent: SentRequest, body: Mapping[str, Any]) -> None:
        headers = {**self._bearer(sent.tenant), "X-Request-Id": sent.id}
        content = {"temperature": 0.0, "ignore_eos": True, "stream": True, **body}
        async with self.http.stream(
            "POST", f"{self.url}/v1/completions", json=content, headers=headers
        ) as answer:
            if answer.status_code != 200:
                sent.error = f"{answer.status_code}: {(await answer.aread())[:200]!r}"
                return
            async for line in answer.aiter_lines():
                if line.startswith('data: {"error"'):
                    sent.error = line[:200]

    async def explanation(self, request_id: str, tenant: str = "auditor") -> dict[str, Any] | None:
        url = f"{self.url}/v1/requests/{request_id}/explanation"
        answer = await self.http.get(url, headers=self._bearer(tenant))
        return answer.json() if answer.status_code == 200 else None

    async def finished_explanation(self, request_id: str) -> dict[str, Any] | None:
        """Return the explanation once the request has ended; None if it does not end."""
        for _ in range(200):
            found = await self.explanation(request_id)
            if found is not None and found["state"] == "finished":
                return found
            await asyncio.sleep(0.05)
        return None

    def _bearer(self, tenant: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.secrets[tenant]}"}


def write_tenants(
    folder: Path, tiers: str, abouts: Mapping[str, str], secrets: Mapping[str, str]
) -> Path:
    """Write a tenants file; each text of `abouts` has a `%s` for the key."""
    lines = [tiers, "tenants:"]
    for name, about in abouts.items():
        digest = write_digest(digest_of_text(secrets[name]))
        lines.append(f"  {name}: {about % repr(digest)}")
    path = folder / "tenants.yaml"
    path.write_text("\n".join([*lines, ""]))
    path.chmod(0o600)
    return path


@contextmanager
def started(
    model: Path | None, folder: Path, secrets: Mapping[str, str]
) -> Iterator[RunningServer]:
    """Yield a server with the tenants above; then stop it."""
    abouts = {name: about for name, (_, about) in TENANTS.items()}
    path = write_tenants(folder, TIERS, abouts, secrets)
    with proc_stats.started(
        model,
        folder,
        {**SETTINGS, "tenants_file": str(path)},
        {**FOR_MODEL, "ledger_url": f"sqlite:///{folder}/ledger.db"},
        key=secrets["auditor"],
        step_s=0.004,
        scheduling_policy="fair",
    ) as server:
        yield server
