"""A profile with known step times."""

from __future__ import annotations

from headway.config import SchedulerConfig
from headway.core.executor import Capacity
from headway.core.slo.steptime import StepShape
from headway.sim.profile.machine import Delays, MachineProfile, ResidualRun, StepFit
from headway.workload import Poisson, Synthetic, Uniform

CAPACITY = Capacity(num_blocks=400, block_size=16, max_model_len=2048)
KNOTS = (1, 16, 64, 512)
COEFFICIENTS = (0.010, 0.014, 0.020, 0.080, 0.0001, 1e-6, 1e-7)
"""Seconds at the knots, then per decode, per context token, per attended token."""


def make_profile(drift: float = 0.0, ratios: tuple[float, ...] = (1.0,)) -> MachineProfile:
    return MachineProfile(
        model="known",
        machine="a test",
        headway="0",
        command="",
        date="",
        scheduler=SchedulerConfig(max_num_seqs=16),
        capacity=CAPACITY,
        enable_prefix_caching=True,
        fit=StepFit(KNOTS, COEFFICIENTS),
        residuals=tuple(ResidualRun(0.02, ratios) for _ in range(12)),
        drift=drift,
        overhead_s=0.001,
        overhead_per_row_s=0.0001,
        delays=(Delays(1, (0.002,), (0.003,)), Delays(64, (0.004,), (0.005,))),
        start_s=1.0,
        largest=StepShape(64, 512, 20_000, 200_000),
        num_steps=1000,
        steal=0.0,
    )


def load(rate: float) -> Synthetic:
    """Return Poisson arrivals of short requests."""
    return Synthetic(Poisson(rate), Uniform(20, 60), Uniform(5, 15))
