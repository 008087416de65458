"""A recording as the load and the machine of a simulation."""

from __future__ import annotations

from pathlib import Path

from headway.errors import ConfigError
from headway.record.kinds import ROUTER
from headway.record.reader import find_recordings, kind_of
from headway.sim.profile.fitting import profile_of
from headway.sim.profile.machine import MachineProfile
from headway.sim.recording.load import load_of
from headway.sim.recording.observed import ObservedEngine, read_observed
from headway.sim.recording.routed import read_routed
from headway.workload import Listed


class Recorded:
    """The requests of an engine or a router that was recorded, and the engine's step times."""

    def __init__(self, path: Path) -> None:
        found = find_recordings([path])
        if len(found) != 1:
            raise ConfigError(f"{path} has {len(found)} recordings; name a file of one of them")
        is_router = kind_of(found[0]) == ROUTER.name
        self._observed = read_routed(found[0]) if is_router else read_observed(found[0])

    def profile(self) -> MachineProfile:
        """Return the step times of the engine."""
        if not isinstance(self._observed, ObservedEngine):
            raise ConfigError("the recording of a router has no step times: name a profile")
        return profile_of(self._observed)

    def load(self, is_closed_loop: bool) -> tuple[Listed, str]:
        """Return its requests, and a text that says how many."""
        observed = self._observed
        load = load_of(observed, is_closed_loop)
        about = f"{len(load.workload.requests)} recorded requests"
        if load.num_drawn:
            about += f" ({load.num_drawn} were refused then: their output lengths are drawn)"
        if load.num_left_out:
            about += f", {load.num_left_out} left out that have no output or did not end"
        if isinstance(observed, ObservedEngine) and observed.num_resent:
            about += f", {observed.num_resent} left out that another engine had before"
        if is_closed_loop:
            about += f", {load.num_following} continue an answer"
        if observed.cut:
            about += f"; the recording is incomplete: {observed.cut}"
        return load.workload, about
