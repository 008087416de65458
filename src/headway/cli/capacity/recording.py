"""A recording as the load and the machine of a simulation."""

from __future__ import annotations

from pathlib import Path

from headway.errors import ConfigError
from headway.record.reader import find_recordings
from headway.sim.profile.fitting import profile_of
from headway.sim.profile.machine import MachineProfile
from headway.sim.recording.load import load_of
from headway.sim.recording.observed import read_observed
from headway.workload import Listed


class RecordedEngine:
    """The requests and the step times of an engine that was recorded."""

    def __init__(self, path: Path) -> None:
        found = find_recordings([path])
        if len(found) != 1:
            raise ConfigError(f"{path} has {len(found)} recordings; name a file of one of them")
        self._observed = read_observed(found[0])

    def profile(self) -> MachineProfile:
        """Return the step times of the engine."""
        return profile_of(self._observed)

    def load(self, is_closed_loop: bool) -> tuple[Listed, str]:
        """Return its requests, and a text that says how many."""
        load = load_of(self._observed, is_closed_loop)
        about = f"{len(load.workload.requests)} recorded requests"
        if load.num_drawn:
            about += f" ({load.num_drawn} were refused then: their output lengths are drawn)"
        if load.num_left_out:
            about += f", {load.num_left_out} left out that have no output or did not end"
        if self._observed.num_resent:
            about += f", {self._observed.num_resent} left out that another engine had before"
        if is_closed_loop:
            about += f", {load.num_following} continue an answer"
        if self._observed.cut:
            about += f"; the recording is incomplete: {self._observed.cut}"
        return load.workload, about
