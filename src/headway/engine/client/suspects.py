"""Which requests may have taken an engine down, and their trials.

The evidence is the journal: the requests in the step that the engine did not finish. A trial sends
a group of them and waits until the group has survived a prefill and a decode. After a group that
survives, the next group is sent. A group that takes another engine down is split in halves. So a
recovery without a culprit takes one trial, or two if some requests had just begun, and a culprit
among n requests costs at most 2 + log2(n) engines.

A long prompt must not hold up all other requests until it is computed. So a trial waits for it for
a number of steps, twice as many for each further engine that failed with it. A prompt that takes
engines down after k steps is on trial for k steps after about log2(k) engines.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from headway.engine.client.streams import RequestStream
from headway.engine.supervise.loss import NUM_CLEARING_TOKENS, EngineLoss

MAX_TRIAL_WAIT_S = 5.0
"""How long a trial waits for a request that the engine has and does not admit, while it ends steps.
One that it does not have yet may be held back while that of another frontend is on trial; and an
engine that ends no step may hang in the first one of this request."""
CALM_S = 2.0
"""A request is tried alone only when no engine was lost without a reason for so long. Machines of
one rack, which are lost together, would otherwise prove the guilt of a request that moves from one
to the next."""
Group = list[RequestStream]


class Suspects:
    """The group on trial, and the groups to try after it."""

    def __init__(self) -> None:
        self._trial: Group = []
        self._heard_at = 0.0
        """When the engine ended a step last."""
        self._num_steps: Counter[str] = Counter()
        """Steps in which each request on trial was running."""
        self._groups: deque[Group] = deque()

    def __contains__(self, stream: RequestStream) -> bool:
        return any(stream in group for group in (self._trial, *self._groups))

    @property
    def is_under_way(self) -> bool:
        """Whether a group is on trial or has yet to be tried."""
        return bool(self._trial or self._groups)

    def may_send(self, stream: RequestStream) -> bool:
        """Return whether a request that is not a suspect may be sent now.

        A request that was a suspect in two failures is tried alone: only then is a third failure
        proof. Requests that were never admitted wait until every suspect is sent, because they must
        not take the blocks of a suspect that was running.
        """
        if self.is_alone:
            return False
        return stream.is_admitted or not self._groups

    @property
    def is_alone(self) -> bool:
        """Whether one request is on trial, and a failure would prove that it is the culprit."""
        return _is_proof(self._trial)

    def begin_trial(self, now: float, unexplained_at: float) -> Group:
        """Begin and return the next trial group, if the last has passed.

        `unexplained_at` is when an engine, of all engines, was last lost without a step that
        explains it.
        """
        if not all(one.has_passed_trial or self._is_overdue(one) for one in self._trial):
            return []
        if self._groups and _is_proof(self._groups[0]) and now - unexplained_at < CALM_S:
            self._trial = []
            return []
        self._trial = self._groups.popleft() if self._groups else []
        self._num_steps.clear()
        return list(self._trial)

    def record_steps(self, num_steps: int, now: float) -> None:
        """Record steps that the engine ended without failing."""
        if num_steps:
            self._heard_at = now
        for stream in self._trial:
            if not stream.is_waiting:
                self._num_steps[stream.request_id] += num_steps

    def remove(self, stream: RequestStream) -> None:
        """Remove a request that has ended."""
        groups = ([one for one in group if one is not stream] for group in self._groups)
        self._groups = deque(group for group in groups if group)
        self._trial = [one for one in self._trial if one is not stream]

    def release_new(self) -> None:
        """Remove suspects of one failure, because another engine can take them at once.

        A request that takes a second engine down is a suspect there.
        """
        self.add_groups(
            [[one for one in group if one.num_crashes > 1] for group in self.take_groups()]
        )

    def take_groups(self) -> list[Group]:
        """Remove and return all groups, because they are tried in another engine."""
        groups = [group for group in (self._trial, *self._groups) if group]
        self._trial, self._groups = [], deque()
        return groups

    def add_groups(self, groups: Sequence[Group]) -> None:
        """Add groups to try after those that are here."""
        self._groups.extend(group for group in groups if group)

    def lose_engine(self, sent: Sequence[RequestStream], loss: EngineLoss) -> RequestStream | None:
        """Choose the suspects after an engine is lost; return a proved culprit.

        `sent` are the live requests that were sent to the engine.
        """
        had = [one for one in sent if _was_in_process(one, loss)]
        named = _blame(had, loss)
        if not named:
            # There is no evidence for or against the earlier suspects.
            self._groups = deque(group for group in (self._trial, *self._groups) if group)
            self._trial = []
            return None
        fresh = [one for one in named if one.is_unproven]
        on_trial = [one for one in fresh if one in self._trial]
        # The engine failed without these requests, or with none of them in the step.
        for stream in (one for group in (self._trial, *self._groups) for one in group):
            if stream not in named:
                stream.num_crashes = 0
        self._trial, self._groups = [], deque()
        # Without a step that names some, every request that is as new may be the cause.
        rivals = fresh if loss.step_ids else [one for one in had if one.is_unproven]
        if on_trial == rivals and _is_proof(on_trial) and not loss.is_shared:
            for stream in named:
                stream.num_crashes = 0
            return on_trial[0]
        self._groups = deque(_split(named, on_trial, fresh))
        return None

    def _is_overdue(self, stream: RequestStream) -> bool:
        """Return whether the trial waits for this request no longer."""
        if stream.is_waiting:
            reached_at = stream.reached_at
            return reached_at is not None and self._heard_at - reached_at > MAX_TRIAL_WAIT_S
        # As many steps as tokens clear a request, twice as many with each failure.
        max_steps = NUM_CLEARING_TOKENS << max(0, stream.num_crashes - 1)
        return self._num_steps[stream.request_id] >= max_steps


def _is_proof(group: Group) -> bool:
    """Return whether a failure of an engine with this group on trial proves who did it."""
    return len(group) == 1 and group[0].num_crashes > 1


def _was_in_process(stream: RequestStream, loss: EngineLoss) -> bool:
    is_held = not loss.held_ids.isdisjoint(stream.samples)
    return not is_held or not loss.step_ids.isdisjoint(stream.samples)


def _blame(sent: Sequence[RequestStream], loss: EngineLoss) -> list[RequestStream]:
    """Count the failure against the requests that may be its cause; return the suspects.

    An engine that failed outside of a step names no request. Then only requests that were not
    cleared when two engines in a row failed this way are suspects.
    """
    named = [one for one in sent if not loss.step_ids.isdisjoint(one.samples)]
    if named or not loss.has_failed:
        for stream in named:
            stream.num_crashes += 1
        return named
    for stream in sent:
        stream.num_crashes += 1
    return [one for one in sent if one.num_crashes > 1]


def _split(named: Group, on_trial: Group, fresh: Group) -> list[Group]:
    """Return the groups to try, in this order.

    The likeliest come first: the requests on trial, or else those that gained the fewest tokens in
    the lost engine. A group that was on trial is split in halves.
    """
    prime = sorted(on_trial or fresh or named, key=lambda one: one.num_tokens_in_engine)
    rest = [one for one in named if one not in prime]
    middle = (len(prime) + 1) // 2
    halves = [prime[:middle], prime[middle:]] if on_trial else [prime]
    return [group for group in (*halves, rest) if group]
