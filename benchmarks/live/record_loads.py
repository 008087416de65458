"""Records loads of the real server for benchmarks/sim/policies.py, into benchmarks/sim/loads.

    python -m benchmarks.live.record_loads MODEL [--only NAME] [--folder DIR]

Each load is served by a server of its own with `--record`. Its requests are read from the
recording: when they reached the engine, how long their outputs were, which blocks they share. How
fast this machine is does not matter: clients do not wait for answers. After this, run
`python -m benchmarks.sim.policies --update`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import merge
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.live.account_clients import SETTINGS, write_tenants
from benchmarks.sim.policy_loads import FOLDER, write_load
from benchmarks.support import proc_stats
from benchmarks.support.servers import RunningServer
from headway.bench.load.openai import Access
from headway.bench.load.records import Outcome
from headway.bench.load.runner import LoadRun, RunLimits, run_load
from headway.record.reader import find_recordings
from headway.sim.recording.items import RecordedItem
from headway.sim.recording.load import load_of
from headway.sim.recording.observed import read_observed
from headway.tenancy.keys import make_key
from headway.workload import Content, Poisson, Synthetic, WorkItem, parse_lengths, parse_prefixes

TOKEN_BYTES = 23_040
"""Keys and values of a token of SmolLM2-135M in bf16."""
BLOCK_SIZE = 16
AUDITOR = "auditor"


@dataclass(frozen=True, slots=True)
class Sender:
    """A tenant: its requests, its entry in the tenants file, fields of its bodies."""

    name: str
    rate: float
    prompt: str
    output: str
    about: str = "keys: [%s]"
    body: Mapping[str, object] = field(default_factory=dict[str, object])
    prefixes: str = "0"

    def items(self, seed: int) -> Iterator[WorkItem]:
        lengths = parse_lengths(self.prompt, "prompt"), parse_lengths(self.output, "output")
        content = Content(prefixes=parse_prefixes(self.prefixes))
        for item in Synthetic(Poisson(self.rate), *lengths, content).items(seed):
            yield replace(item, tenant=self.name)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Tenants that share a server for some seconds."""

    name: str
    about: str
    seconds: float
    speed: float
    """How much faster the requests arrive in the simulation: this machine may be slower."""
    senders: tuple[Sender, ...]
    num_blocks: int = 1024
    settings: tuple[str, ...] = ()
    """Settings of the simulation."""
    tiers: str = "{}"
    policy: str = "fair"

    @property
    def concurrency(self) -> None:
        return None

    def items(self, seed: int) -> Iterator[WorkItem]:
        streams = [one.items(100 * seed + number) for number, one in enumerate(self.senders)]
        return merge(*streams, key=lambda item: item.at)


CHAT, SHORT = "uniform:32,256", "lognormal:3.6,0.6,min=4,max=160"
RECIPES = (
    Recipe(
        "chat",
        "three tenants, one of weight 2, one whose outputs end at stop strings",
        25.0,
        2.0,
        (
            Sender("ada", 1.5, CHAT, SHORT),
            Sender("bob", 1.2, CHAT, SHORT, "keys: [%s], weight: 2"),
            Sender(
                "cyd", 1.0, CHAT, "fixed:200",
                body={"ignore_eos": False, "stop": ["\n", "."], "temperature": 0.8},
            ),
        ),
    ),
    Recipe(
        "flood",
        "one tenant sends several times what can be served, two send little",
        14.0,
        2.5,
        (
            Sender("flood", 8.0, "uniform:32,200", SHORT),
            Sender("guest-1", 0.8, "uniform:32,200", SHORT),
            Sender("guest-2", 0.8, "uniform:32,200", SHORT),
        ),
        settings=("max_num_seqs=16",),
    ),
    Recipe(
        "deadlines",
        "three tiers with targets, more than can be served in time",
        18.0,
        1.8,
        (
            Sender("interactive", 2.8, "uniform:40,240", SHORT, "keys: [%s], tier: interactive"),
            Sender("standard", 1.8, CHAT, SHORT, "keys: [%s], tier: standard", {"priority": 1}),
            Sender("batch", 1.4, "uniform:200,600", SHORT, "keys: [%s], tier: batch",
                   {"priority": 2}),
        ),
        tiers="{interactive: {ttft_ms: 1000, tpot_ms: 80}, standard: {ttft_ms: 4000, tpot_ms: 150},"
        " batch: {deadline_ms: 30000}}",
        # A policy that admits by targets would keep some from the recording.
        policy="priority",
    ),
    Recipe(
        "small-kv",
        "long outputs in few KV blocks; one tenant has a KV quota, one a higher priority",
        20.0,
        2.0,
        (
            Sender("capped", 1.6, "uniform:32,128", "uniform:60,180",
                   "keys: [%s], quotas: {kv_share: 0.3}"),
            Sender("free", 1.6, "uniform:32,128", "uniform:60,180"),
            Sender("urgent", 0.8, "uniform:32,96", "uniform:20,60", body={"priority": -1}),
        ),
        num_blocks=120,
    ),
    Recipe(
        "prefixes",
        "prompts that begin with one of two prefixes of their tenant",
        22.0,
        2.2,
        tuple(
            Sender(name, rate, "uniform:280,400", "uniform:16,72", prefixes="0.8,count=2")
            for name, rate in (("one", 2.2), ("two", 1.4), ("three", 0.8))
        ),
    ),
    Recipe(
        "long-prompts",
        "long prompts of one tenant beside chats of another",
        24.0,
        2.2,
        (
            Sender("reader", 0.5, "uniform:600,1400", "uniform:16,64"),
            Sender("chat", 3.0, "uniform:24,120", SHORT),
        ),
    ),
    Recipe(
        "spot",
        "spot requests in unused capacity, beside ordinary ones with two samples each",
        18.0,
        1.8,
        (
            Sender("day", 1.2, CHAT, SHORT, body={"n": 2, "temperature": 0.8}),
            Sender("night", 3.0, CHAT, SHORT, "keys: [%s], tier: night"),
        ),
        tiers="{night: {spot: true}}",
        settings=("max_num_seqs=16",),
    ),
)  # fmt: skip


def serve(model: Path, recipe: Recipe, folder: Path) -> list[RecordedItem]:
    """Serve a recipe; return its requests as the engine saw them."""
    secrets = {one.name: make_key() for one in recipe.senders} | {AUDITOR: make_key()}
    abouts = {one.name: f"{{{one.about}}}" for one in recipe.senders}
    abouts[AUDITOR] = "{keys: [%s], admin: true}"
    tenants_file = write_tenants(folder, f"tiers: {recipe.tiers}", abouts, secrets)
    settings = {
        **SETTINGS,
        "tenants_file": str(tenants_file),
        "record": str(folder / "recordings"),
        "kv_cache_memory_bytes": recipe.num_blocks * BLOCK_SIZE * TOKEN_BYTES,
        "scheduling_policy": recipe.policy,
    }
    access = {one.name: Access(secrets[one.name], one.body) for one in recipe.senders}
    key = secrets[AUDITOR]

    async def send(server: RunningServer) -> LoadRun:
        target = replace(await proc_stats.target_of(server, key), access=access)
        return await run_load(target, recipe, RunLimits(duration_s=recipe.seconds), seed=1)

    with proc_stats.started(model, folder, settings, key=key) as server:
        run = proc_stats.run_client(send(server))
    failed = [one.error for one in run.records if one.outcome is not Outcome.COMPLETED]
    if failed:
        raise SystemExit(f"{recipe.name}: {len(failed)} requests failed: {failed[0]}")
    return _read(find_recordings([folder / "recordings"]), recipe.speed)


def _read(paths: Sequence[Path], speed: float) -> list[RecordedItem]:
    (path,) = paths
    items = load_of(read_observed(path)).workload.requests
    return [replace(one, at=one.at / speed) for one in items if isinstance(one, RecordedItem)]


def main() -> int:
    parser = proc_stats.battery_parser(__doc__, can_fake=False)
    parser.add_argument("--only", default="", help="record only loads whose name contains this")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = proc_stats.arguments(parser)
    for recipe in [one for one in RECIPES if args.only in one.name]:
        with TemporaryDirectory() as name:
            items = serve(args.model, recipe, Path(name))
        path = args.folder / f"{recipe.name}.json"
        sizes = (f"num_blocks={recipe.num_blocks}", f"num_slots={recipe.num_blocks // 4}")
        write_load(path, recipe.about, (*sizes, *recipe.settings), BLOCK_SIZE, items)
        print(f"{recipe.name}: {len(items)} requests, {path.stat().st_size} bytes", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
