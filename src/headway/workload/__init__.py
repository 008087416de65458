"""Seeded workloads for bench and sim: prompts, lengths and arrivals.

In reading order:

    workload.py  whole workloads: synthetic, replayed, listed
    arrivals.py  arrival processes
    lengths.py   length distributions
    content.py   tenants and prompts
    trace.py     trace files
    mixed.py     fixed offline workloads
    spec.py      text form of distributions
"""

from headway.workload.arrivals import (
    Arrivals,
    ClosedLoop,
    Diurnal,
    Gamma,
    OnOff,
    Poisson,
    parse_arrivals,
    parse_rates,
)
from headway.workload.content import (
    Content,
    Prefixes,
    Tenants,
    Vocabulary,
    parse_prefixes,
    parse_tenants,
    parse_vocabulary,
)
from headway.workload.lengths import (
    Bounds,
    Empirical,
    Fixed,
    Lengths,
    Lognormal,
    Uniform,
    parse_lengths,
)
from headway.workload.mixed import WORKLOADS, OfflineWorkload, WorkItem, parse_workload
from headway.workload.trace import Trace, TraceRow, read_trace
from headway.workload.workload import Listed, Replay, Scale, Synthetic, Workload

__all__ = [
    "WORKLOADS",
    "Arrivals",
    "Bounds",
    "ClosedLoop",
    "Content",
    "Diurnal",
    "Empirical",
    "Fixed",
    "Gamma",
    "Lengths",
    "Listed",
    "Lognormal",
    "OfflineWorkload",
    "OnOff",
    "Poisson",
    "Prefixes",
    "Replay",
    "Scale",
    "Synthetic",
    "Tenants",
    "Trace",
    "TraceRow",
    "Uniform",
    "Vocabulary",
    "WorkItem",
    "Workload",
    "parse_arrivals",
    "parse_lengths",
    "parse_prefixes",
    "parse_rates",
    "parse_tenants",
    "parse_vocabulary",
    "parse_workload",
    "read_trace",
]
