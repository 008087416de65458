"""The simulator: the real engine core and router on a virtual clock, without a model.

Owns virtual engines and fleets, step times, profiles, predictions and plans. Must not import
tensors or a server. What does not read recordings needs the standard library only, and so runs on
PyPy. In reading order:

    steps.py       step times, and executors that compute no tokens
    engine.py      VirtualEngine: an EngineCore on a virtual clock
    records.py     one record per request
    simulation.py  Simulation: a run of recorded requests
    forecasts.py   early refusals by the forecasts of engines
    fleet.py       VirtualFleet: several engine cores behind a router
    direct.py      one engine without a router
    recording/     what a recorded engine did, and its requests as a load
    profile/       what steps and requests take on one machine with one model
    prediction/    figures, plans and reports of a load on simulated engines
"""

from headway.sim.engine import VirtualEngine
from headway.sim.records import Record
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
]
