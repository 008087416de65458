"""Measures whether TTFT reveals the prompts of another tenant.

    python -m benchmarks.live.cache_probe MODEL [--probes 1000] [--json FILE]

A real server over real sockets, two pairs of tenants. The tenants of the first pair have default
terms; those of the second have one cache group. In each probe the victim sends a prompt; then the
attacker sends a prompt of the same length and measures the TTFT. At random, the attacker's prompt
shares the victim's prefix (all but the last few tokens), or the victim sent another prompt. All
prompts are random and used once, so only the victim's request can have cached the prefix. Probes of
the two pairs alternate.

AUC is the probability that the TTFT is shorter for a prompt that the victim has sent than for one
it has not, with a 95 % interval (DeLong et al., 1988). 0.5 is chance; a value below 0.5 reveals as
much as one above. The script also checks the cached tokens that the server reports: 0 for the first
pair, and most of the prefix for the second, which shows that the probe works.

The exit code is 1 if the prompt is revealed: an AUC more than 0.05 from 0.5, or a cached token.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support import proc_stats
from benchmarks.support.servers import Launcher, RunningServer, start_model_server
from benchmarks.support.tiny_tokenizers import write_byte_level
from headway.bench.load.http import HttpClient
from headway.bench.load.openai import Access, Target, ask, first_model
from headway.bench.load.records import LoadRecord, Outcome
from headway.clock import SystemClock
from headway.tenancy.keys import digest_of_text, make_key, write_digest
from headway.workload import Vocabulary, WorkItem

NUM_PROMPT, NUM_OWN = 192, 8
"""Tokens of a prompt, and how many at its end are the attacker's own."""
MAX_AUC = 0.55
NUM_WARM_UP = 20
PAIRS = ("isolated", "shared")


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe: whether the victim had sent the prefix, and the attacker's measurements."""

    is_known: bool
    ttft_s: float
    num_cached: int


@dataclass(frozen=True, slots=True)
class Auc:
    """Area under the ROC curve, with a 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def distance(self) -> float:
        """AUC of the better of both readings: shorter or longer means known."""
        return max(self.value, 1.0 - self.value)


def auc_of(known: Sequence[float], unknown: Sequence[float]) -> Auc:
    """Return the probability that a time of `known` is below one of `unknown`.

    A tie counts half.
    """
    one, other = np.array(known)[:, None], np.array(unknown)[None, :]
    is_below = (one < other) + 0.5 * (one == other)
    of_known, of_unknown = is_below.mean(axis=1), is_below.mean(axis=0)
    variance = of_known.var(ddof=1) / len(known) + of_unknown.var(ddof=1) / len(unknown)
    value, margin = float(is_below.mean()), 1.96 * math.sqrt(variance)
    return Auc(value, max(0.0, value - margin), min(1.0, value + margin))


@dataclass(frozen=True, slots=True)
class Keys:
    """New keys of the victim and the attacker of each pair."""

    secrets: Mapping[str, str] = field(
        default_factory=lambda: {
            f"{role}-{pair}": make_key() for pair in PAIRS for role in ("victim", "attacker")
        }
    )

    def tenants_file(self) -> str:
        lines = ["tenants:"]
        for name, secret in self.secrets.items():
            lines.append(f"  {name}:")
            lines.append(f"    keys: ['{write_digest(digest_of_text(secret))}']")
            if name.endswith("shared"):
                lines.append("    cache_group: pair")
        return "\n".join([*lines, ""])


class Prober:
    """Sends probes one after another."""

    def __init__(self, target: Target, vocabulary: Vocabulary, seed: int) -> None:
        self._target = target
        self._vocabulary = vocabulary
        self._draw = random.Random(f"probe/{seed}")
        self._client = HttpClient(target.origin)
        self._clock = SystemClock()

    def close(self) -> None:
        self._client.close()

    async def probe(self, pair: str) -> Probe:
        prefix = self._tokens(NUM_PROMPT - NUM_OWN)
        other = self._tokens(NUM_PROMPT - NUM_OWN)
        is_known = self._draw.random() < 0.5
        await self._ask(f"victim-{pair}", prefix if is_known else other)
        record = await self._ask(f"attacker-{pair}", prefix)
        return Probe(is_known, record.ttft_s or math.inf, record.num_cached_tokens or 0)

    def _tokens(self, count: int) -> list[int]:
        return self._vocabulary.token_ids(self._draw, count)

    async def _ask(self, tenant: str, prefix: list[int]) -> LoadRecord:
        prompt = tuple(prefix + self._tokens(NUM_OWN))
        record = LoadRecord(0, tenant, self._clock.now(), len(prompt))
        item = WorkItem(prompt, 1, tenant=tenant)
        await ask(self._client, self._target, item, record, self._clock)
        if record.outcome is not Outcome.COMPLETED:
            raise RuntimeError(f"{tenant}: {record.error}")
        return record


@contextmanager
def started(model: Path | None, folder: Path, keys: Keys) -> Iterator[RunningServer]:
    """Yield a server with these tenants; then stop it."""
    path = folder / "tenants.yaml"
    path.write_text(keys.tenants_file())
    path.chmod(0o600)
    if model is None:
        tokenizer = write_byte_level(folder / "tokenizer.gguf", pre="gpt-2")
        server = Launcher(folder, tokenizer)(server={"tenants_file": str(path)})
    else:
        flags = ("--tenants-file", str(path), "--kv-cache-memory-bytes", "512M")
        server = start_model_server(model, folder / "server.log", *flags)
    with proc_stats.ended(server):
        yield server.wait_ready(next(iter(keys.secrets.values())))


async def run(
    server: RunningServer, keys: Keys, vocabulary: Vocabulary, num_probes: int, seed: int
) -> dict[str, list[Probe]]:
    """Send `num_probes` probes of each pair, alternating."""
    origin = proc_stats.origin_of(server)
    client = HttpClient(origin)
    model = await first_model(client, tuple(keys.secrets.values()))
    client.close()
    access = {name: Access(api_key=secret) for name, secret in keys.secrets.items()}
    prober = Prober(Target(origin, model, access=access), vocabulary, seed)
    found: dict[str, list[Probe]] = {pair: [] for pair in PAIRS}
    try:
        for _ in range(NUM_WARM_UP):
            await prober.probe("isolated")
        for number in range(num_probes):
            for pair in PAIRS if number % 2 else reversed(PAIRS):
                found[pair].append(await prober.probe(pair))
            await asyncio.sleep(0)
    finally:
        prober.close()
    return found


def report_on(probes: Sequence[Probe]) -> dict[str, Any]:
    known = [probe for probe in probes if probe.is_known]
    unknown = [probe for probe in probes if not probe.is_known]
    auc = auc_of([probe.ttft_s for probe in known], [probe.ttft_s for probe in unknown])
    return {
        "num_probes": len(probes),
        "num_known": len(known),
        "auc": auc.value,
        "auc_95": [auc.low, auc.high],
        "distance": auc.distance,
        "ttft_p50_known_s": statistics.median(probe.ttft_s for probe in known),
        "ttft_p50_unknown_s": statistics.median(probe.ttft_s for probe in unknown),
        "cached_known": statistics.mean(probe.num_cached for probe in known),
        "cached_unknown": statistics.mean(probe.num_cached for probe in unknown),
    }


def failures_in(report: Mapping[str, Any]) -> list[str]:
    """Return the failures that a report shows.

    Without prefix hits in the shared pair, the probe could not show anything.
    """
    alone, shared = report["isolated"], report["shared"]
    failures = []
    if alone["distance"] > MAX_AUC:
        failures.append(f"isolated: AUC {alone['auc']:.3f} is more than {MAX_AUC} one way")
    if alone["cached_known"] or alone["cached_unknown"]:
        failures.append("isolated: the server reported cached tokens to the attacker")
    if shared["cached_known"] < (NUM_PROMPT - NUM_OWN) / 2:
        failures.append(
            "shared: the attacker's prompts were not in the cache; the probe shows nothing"
        )
    if shared["cached_unknown"]:
        failures.append("shared: prompts that no tenant had sent were in the cache")
    return failures


def main() -> int:
    parser = proc_stats.battery_parser(__doc__)
    parser.add_argument("--probes", type=int, default=1000, help="probes of each pair")
    parser.add_argument("--seed", type=int, default=1)
    args = proc_stats.arguments(parser)
    vocabulary = proc_stats.LETTERS if args.fake else Vocabulary()
    keys = Keys()
    with (
        tempfile.TemporaryDirectory() as name,
        started(args.model, Path(name), keys) as server,
    ):
        work = run(server, keys, vocabulary, args.probes, args.seed)
        found = proc_stats.run_client(work)
    report = {pair: report_on(probes) for pair, probes in found.items()}
    for pair, row in report.items():
        low, high = row["auc_95"]
        print(
            f"{pair:9} AUC {row['auc']:.3f} ({low:.3f} to {high:.3f}) over {row['num_probes']}; "
            f"TTFT p50 {1e3 * row['ttft_p50_known_s']:.1f} ms if the victim had sent it, "
            f"{1e3 * row['ttft_p50_unknown_s']:.1f} ms if not; cached tokens "
            f"{row['cached_known']:.0f} and {row['cached_unknown']:.0f}"
        )
    return proc_stats.conclude(report, failures_in(report), args)


if __name__ == "__main__":
    sys.exit(main())
