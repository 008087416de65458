"""The real engine core on a virtual clock: what a load would meet, without a model.

Owns the virtual engine, the cost of a step and the records of requests. It must not import tensors
or a server: everything here runs in plain Python. Reading order: steps.py, engine.py, records.py,
simulation.py.
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
