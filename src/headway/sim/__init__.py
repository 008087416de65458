"""The simulator: the real engine core on a virtual clock, without a model.

Owns the virtual engine, step profiles and request records. Must not import tensors or a server. In
reading order:

    steps.py       step profiles, and executors that compute no tokens
    engine.py      VirtualEngine: an EngineCore on a virtual clock
    records.py     one record per request
    simulation.py  Simulation: a run of recorded requests
    fleet.py       VirtualFleet: several engine cores behind a router
"""

from headway.sim.engine import VirtualEngine
from headway.sim.records import Record, percentile
from headway.sim.simulation import SimulatedStep, Simulation
from headway.sim.steps import SMOLLM2_135M, CannedExecutor, StepProfile, TimedExecutor

__all__ = [
    "SMOLLM2_135M",
    "CannedExecutor",
    "Record",
    "SimulatedStep",
    "Simulation",
    "StepProfile",
    "TimedExecutor",
    "VirtualEngine",
    "percentile",
]
