"""Which requests may have taken an engine down, and in which order the next engine gets them.

Evidence is the journal: the requests in the step that the engine did not finish. A trial sends a
group of them and waits until the group has survived a prefill and a decode. A group that survives
makes room for the next group; a group that takes another engine down is split in halves. So a
recovery without a culprit takes two trials, and a culprit among n requests costs about log2(n)
engines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from headway.engine.client.streams import RequestStream

MAX_TRIAL_WAIT_S = 5.0
"""How long a trial waits for a request that finds no place in the engine."""
Group = list[RequestStream]


class Suspects:
    """The group on trial, and the groups to try after it."""

    def __init__(self) -> None:
        self._trial: Group = []
        self._began_at = 0.0
        self._groups: deque[Group] = deque()

    def __contains__(self, stream: RequestStream) -> bool:
        return any(stream in group for group in (self._trial, *self._groups))

    @property
    def is_under_way(self) -> bool:
        """Whether anybody is on trial or has yet to be tried."""
        return bool(self._trial or self._groups)

    def may_send(self, stream: RequestStream) -> bool:
        """Whether a request that is not suspected may be sent now.

        A request that has blamed itself in two engines is tried with nobody beside it: only then
        is a third failure proof. Requests that never ran wait until every suspect is sent, because
        a suspect that ran must not find its place taken.
        """
        if len(self._trial) == 1 and self._trial[0].num_crashes > 1:
            return False
        return stream.metrics.admitted_at is not None or not self._groups

    def begin_trial(self, now: float) -> Group:
        """Put the next group on trial once the one before has passed; who is in it."""
        if any(not one.has_passed_trial and not self._is_stuck(one, now) for one in self._trial):
            return []
        self._trial = self._groups.popleft() if self._groups else []
        self._began_at = now
        return list(self._trial)

    def remove(self, stream: RequestStream) -> None:
        """Forget a request that has ended."""
        groups = ([one for one in group if one is not stream] for group in self._groups)
        self._groups = deque(group for group in groups if group)
        self._trial = [one for one in self._trial if one is not stream]

    def lose_engine(
        self, sent: Sequence[RequestStream], step_ids: frozenset[str], has_failed: bool
    ) -> RequestStream | None:
        """Decide who is suspected now that an engine is lost; the culprit, if that is proved.

        `sent` are the live requests that the engine knew, `step_ids` those in its unfinished step;
        `has_failed` if the engine itself reported an exception.
        """
        named = _blame(sent, step_ids, has_failed)
        if not named:
            # Nothing speaks for or against those who were suspected before.
            self._groups = deque(group for group in (self._trial, *self._groups) if group)
            self._trial = []
            return None
        fresh = [one for one in named if one.is_unproven]
        on_trial = [one for one in fresh if one in self._trial]
        # The engine failed without them, or with them in no step.
        for stream in (one for group in (self._trial, *self._groups) for one in group):
            if stream not in named:
                stream.num_crashes = 0
        self._trial, self._groups = [], deque()
        if on_trial == fresh and len(on_trial) == 1 and on_trial[0].num_crashes > 1:
            for stream in named:
                stream.num_crashes = 0
            return on_trial[0]
        self._groups = deque(_split(named, on_trial, fresh))
        return None

    def _is_stuck(self, stream: RequestStream, now: float) -> bool:
        return stream.is_waiting and now - self._began_at > MAX_TRIAL_WAIT_S


def _blame(
    sent: Sequence[RequestStream], step_ids: frozenset[str], has_failed: bool
) -> list[RequestStream]:
    """Count the failure against those it may be due to; those who are suspected for it.

    An engine that failed outside of any step names nobody. Only requests that were there, not yet
    cleared, when two engines in a row failed like that are suspected.
    """
    named = [one for one in sent if not step_ids.isdisjoint(one.samples)]
    if named or not has_failed:
        for stream in named:
            stream.num_crashes += 1
        return named
    for stream in sent:
        stream.num_crashes += 1
    return [one for one in sent if one.num_crashes > 1]


def _split(named: Group, on_trial: Group, fresh: Group) -> list[Group]:
    """The groups to try, in this order.

    First the likeliest: who was on trial, else who had gained least in the lost engine. They are
    split in halves, unless others of the step are left as the other half.
    """
    prime = sorted(on_trial or fresh or named, key=lambda one: one.num_tokens_in_engine)
    rest = [one for one in named if one not in prime]
    middle = (len(prime) + 1) // 2
    halves = [prime] if rest and not on_trial else [prime[:middle], prime[middle:]]
    return [group for group in (*halves, rest) if group]
