"""Simulates loads under every policy and compares the figures with those of other code.

    python -m benchmarks.sim.policies                    # against docs/results/policies.json
    python -m benchmarks.sim.policies --against main~5   # against the code of a commit
    python -m benchmarks.sim.policies --update           # writes docs/results/policies.json

The real scheduler and the shipped profile, one engine, fixed seeds. The loads are in sim/loads
(recordings of the real server) and sim/policy_loads.py. The same code gives the same figures, so
that every change to a policy shows in this table, and a change that should do nothing shows none.
Policies: `fair` and `fcfs`; `priority` and `deadline` for loads with priorities and with targets.

    good        share of the requests within the targets of their tenant
    jain        Jain index over the tenants: service until the last arrival by the fair share, in
                weighted tokens. The fair share is max-min: what a tenant does not need is divided
                by weight among the others

The exit code is 1 if a figure differs, and 0 after --update.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tarfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.sim.fair_rig import jain
from benchmarks.sim.policy_loads import PolicyLoad, read_loads
from benchmarks.sim.policy_rows import (
    ALL,
    Row,
    RowKey,
    compare,
    read_rows,
    rounded,
    show,
    write_rows,
)
from headway.config import SchedulerConfig
from headway.core.terms import NO_TARGETS
from headway.core.waiting.accounts import OUTPUT_COST, PROMPT_COST
from headway.sim.fleet import EngineSpec
from headway.sim.prediction.figures import summarize
from headway.sim.prediction.served import ServedRequest
from headway.sim.prediction.serving import Limits, serve_load
from headway.sim.prediction.settings import change_settings
from headway.sim.prediction.setup import Setup
from headway.sim.profile.catalog import find_profile
from headway.sim.profile.machine import MachineProfile

ROOT = Path(__file__).resolve().parents[2]
BASELINE = ROOT / "docs" / "results" / "policies.json"
BASELINE_NAME = str(BASELINE.relative_to(ROOT))
PROFILE = "smollm2-135m-2-cores"
COMMAND = "python -m benchmarks.sim.policies --update"


def simulate_all() -> list[Row]:
    """Return the rows of all loads under all policies."""
    profile = find_profile(PROFILE)
    return [
        row
        for load in read_loads()
        for policy in load.policies
        for row in simulate(profile, load, policy)
    ]


def simulate(profile: MachineProfile, load: PolicyLoad, policy: str) -> list[Row]:
    """Return the figures of all requests, and of each tenant if there are several."""
    setup = Setup(profile, EngineSpec(SchedulerConfig(), profile.capacity))
    setup = change_settings(setup, [*load.settings, f"policy={policy}"])
    limits = Limits(len(load.workload.requests))
    served = serve_load(setup, load.workload, limits).requests
    names = sorted({one.tenant for one in served if one.tenant is not None})
    whole = replace(_row_of(load, policy, ALL, served), jain=rounded(jain_of(load, served)))
    return [whole, *(_row_of(load, policy, name, served) for name in names)]


def _row_of(load: PolicyLoad, policy: str, tenant: str, served: Sequence[ServedRequest]) -> Row:
    mine = [one for one in served if tenant in (ALL, one.tenant)]
    targets = load.targets.get(tenant, NO_TARGETS)
    found = summarize(mine, None if targets == NO_TARGETS else targets)
    return Row(
        load.name,
        policy,
        tenant,
        found.num_requests,
        found.num_refused,
        rounded(1e3 * found.ttft_s[50]),
        rounded(1e3 * found.ttft_s[99]),
        rounded(1e3 * found.tpot_s[50]),
        rounded(1e3 * found.tpot_s[99]),
        rounded(found.output_tokens_per_s),
        rounded(found.good_share),
        None,
        sum(one.num_preemptions for one in mine),
    )


# ------------------------------------------------------------------------ fairness


def jain_of(load: PolicyLoad, served: Sequence[ServedRequest]) -> float | None:
    """Return Jain's index of service by fair share; None with one tenant."""
    until = max(one.scheduled_at for one in served)
    asked: dict[str, float] = defaultdict(float)
    got: dict[str, float] = defaultdict(float)
    for one in [one for one in served if not one.is_refused]:
        name, num_output = one.tenant or "", one.num_output_tokens
        asked[name] += PROMPT_COST * one.num_prompt_tokens + OUTPUT_COST * num_output
        got[name] += service_until(one, until)
    weights = {name: load.weights.get(name, 1.0) for name in asked}
    shares = fair_shares(asked, weights, sum(got.values()))
    ratios = [got[name] / share for name, share in shares.items() if share > 0.0]
    return jain(ratios) if len(ratios) > 1 else None


def service_until(one: ServedRequest, until: float) -> float:
    """Return the service of a request up to a time; outputs come evenly."""
    if one.first_token_at is None or one.finished_at is None or one.first_token_at > until:
        return 0.0
    duration_s = max(one.finished_at - one.first_token_at, 1e-9)
    share = min(1.0, (until - one.first_token_at) / duration_s)
    return PROMPT_COST * one.num_prompt_tokens + share * OUTPUT_COST * one.num_output_tokens


def fair_shares(
    asked: Mapping[str, float], weights: Mapping[str, float], total: float
) -> dict[str, float]:
    """Divide a total by weight; nobody gets more than it asked for."""
    shares: dict[str, float] = {}
    # By what satisfies a tenant first: what it leaves is divided among the others.
    names = sorted(asked, key=lambda name: asked[name] / weights[name])
    for number, name in enumerate(names):
        weight = sum(weights[other] for other in names[number:])
        shares[name] = min(asked[name], total * weights[name] / weight)
        total -= shares[name]
    return shares


# ---------------------------------------------------------------------- comparison


def rows_of_commit(ref: str) -> dict[RowKey, Row]:
    """Simulate the same loads with the scheduler and the simulator of a commit."""
    command = ["git", "archive", "--format=tar", ref, "src/headway"]
    archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        raise SystemExit(f"no code of {ref!r}: {archive.stderr.decode().strip()}")
    with TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        run = subprocess.run(
            [sys.executable, "-m", "benchmarks.sim.policies", "--rows"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([f"{folder}/src", str(ROOT)])},
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
        )
    if run.returncode:
        raise SystemExit(f"the loads cannot be simulated with the code of {ref}:\n{run.stderr}")
    return read_rows(run.stdout)


def read_baseline() -> dict[RowKey, Row]:
    return read_rows(BASELINE.read_text()) if BASELINE.exists() else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--against", metavar="GIT_REF", help="compare with the code of a commit")
    parser.add_argument("--update", action="store_true", help=f"write {BASELINE_NAME}")
    parser.add_argument("--rows", action="store_true", help="print the rows as JSON, and no more")
    args = parser.parse_args()
    rows = simulate_all()
    if args.rows:
        print(write_rows(rows, COMMAND), end="")
        return 0
    old = rows_of_commit(args.against) if args.against else read_baseline()
    name = args.against or BASELINE_NAME
    changes = compare(old, rows, name)
    print(f"{show(rows)}\n\n{changes or f'no figure differs from {name}'}")
    if args.update:
        BASELINE.write_text(write_rows(rows, COMMAND))
        print(f"written: {BASELINE_NAME}")
        return 0
    return 1 if changes else 0


if __name__ == "__main__":
    sys.exit(main())
