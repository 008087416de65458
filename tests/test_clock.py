"""The system clock and the virtual clock."""

from __future__ import annotations

import pytest

from headway.clock import SystemClock, VirtualClock


def test_the_system_clock_never_runs_backwards():
    clock = SystemClock()
    times = [clock.now() for _ in range(100)]
    assert times == sorted(times)


def test_a_virtual_clock_moves_only_when_advanced():
    clock = VirtualClock(5.0)
    assert [clock.now(), clock.now()] == [5.0, 5.0]
    clock.advance_to(7.5)
    clock.advance_to(7.5)
    assert clock.now() == 7.5


def test_a_virtual_clock_refuses_to_go_back():
    clock = VirtualClock()
    clock.advance_to(2.0)
    with pytest.raises(ValueError, match="backwards"):
        clock.advance_to(1.0)
    assert clock.now() == 2.0
