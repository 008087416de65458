"""The slice of the state machine that every run affords; scripts/test-slow runs the rest."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

from tests.properties.machine import EngineMachine

TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow],
)
