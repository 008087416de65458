"""Loads whose predictions are checked against the real model."""

from __future__ import annotations

import argparse

from headway.workload import (
    Content,
    Poisson,
    Synthetic,
    parse_lengths,
    parse_prefixes,
    parse_tenants,
    parse_vocabulary,
)


def _workload(prompt: str, output: str, tenants: str = "1", prefixes: str = "0") -> Synthetic:
    content = Content(
        parse_vocabulary("100,20000"), parse_tenants(tenants), parse_prefixes(prefixes)
    )
    return Synthetic(
        Poisson(1.0), parse_lengths(prompt, "prompt"), parse_lengths(output, "output"), content
    )


WORKLOADS = {
    "chat": _workload("uniform:32,256", "lognormal:4.0,0.9,min=8,max=256"),
    "long prompts": _workload("lognormal:5.9,0.6,min=64,max=1200", "uniform:8,64"),
    "long outputs": _workload("uniform:8,64", "uniform:100,300", "4,zipf=1.0"),
    "prefixes": _workload(
        "uniform:280,400", "uniform:16,96", "3,zipf=1.0", "0.8,count=2,tokens=256"
    ),
}
SHORT_WORKLOADS = {
    "short answers": _workload("uniform:16,96", "uniform:8,40"),
    "system prompts": _workload(
        "uniform:270,340", "uniform:8,32", prefixes="1.0,count=4,tokens=256"
    ),
    "four tenants": _workload("uniform:8,32", "uniform:20,60", "4,zipf=1.0"),
}
"""Short ones: a minute of 1,000 requests brings about as much work as the next."""
LABEL_WORKLOADS = {
    "labels": _workload("uniform:8,24", "uniform:1,4"),
    "labels with system prompts": _workload(
        "uniform:264,288", "uniform:1,8", prefixes="1.0,count=4,tokens=256"
    ),
    "labels for four tenants": _workload("uniform:8,24", "uniform:4,12", "4,zipf=1.0"),
}
"""Questions with an answer of a few tokens: so many a second that chance hardly matters."""
ALL_WORKLOADS = WORKLOADS | SHORT_WORKLOADS | LABEL_WORKLOADS


def parse_names(text: str) -> tuple[str, ...]:
    """Parse names of workloads, with commas between them."""
    names = tuple(text.split(","))
    for name in names:
        if name not in ALL_WORKLOADS:
            known = ", ".join(ALL_WORKLOADS)
            raise argparse.ArgumentTypeError(f"no workload is called {name!r}: {known}")
    return names
