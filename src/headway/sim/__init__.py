"""The simulator: the real engine core and router on a virtual clock, without a model.

Owns virtual engines and fleets, step times, profiles, predictions and plans. Must not import
tensors or a server. What does not read recordings needs the standard library only, and so runs on
PyPy. In reading order:

    steps.py       step times, and executors that compute no tokens
    engine.py      VirtualEngine: an EngineCore on a virtual clock
    records.py     one record per request
    simulation.py  Simulation: a run of recorded requests
    fleet.py       VirtualFleet: several engine cores behind a router
    direct.py      one engine without a router
    plain.py       values of JSON as dataclasses
    profile.py     profiles: measured step times, overhead and delays
    datasheet.py   profiles computed from the datasheets of GPUs
    catalog.py     profiles by name
    observed.py    steps and requests of a recorded engine
    fitting.py     fits a profile to them
    items.py       a recorded request as an item of a load
    recorded.py    the requests of a recording as a load
    setup.py       what is simulated: engines, frontends, tenants, failures
    served.py      what a load was served
    pool.py        engines that start, drain and are killed; the autoscaler
    serving.py     a load on simulated engines, as clients see it
    figures.py     figures over several runs, with intervals
    planning.py    how much load engines carry, how many a load needs
    settings.py    settings of a simulation as text
    tables.py      figures as rows
    page.py        parts of an HTML report
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
