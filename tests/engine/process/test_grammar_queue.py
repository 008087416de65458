"""Requests that wait for their grammar: nobody waits with them, and an abort reaches them."""

from __future__ import annotations

import select
import threading
from collections import Counter

from headway.core.params import SamplingParams
from headway.core.request import FinishReason
from headway.core.terms import Terms
from headway.engine.process.grammar_queue import PREPARE_AFTER_MS, CompiledRequest, GrammarQueue
from headway.engine.process.messages import AddRequest


class SlowCompiler:
    """Compiles a grammar when the test says so; `bad` cannot be compiled."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.num_users: Counter[str] = Counter()
        self.may_go_on = threading.Semaphore(0)

    def prepare(self) -> None:
        self.done.append("prepared")

    def is_compiled(self, grammar: str) -> bool:
        return grammar in self.done

    def matcher(self, grammar: str) -> object:
        assert self.may_go_on.acquire(timeout=5)
        if grammar == "bad":
            raise ValueError("it cannot be compiled")
        self.done.append(grammar)
        return None

    def keep(self, grammar: str) -> None:
        self.num_users[grammar] += 1

    def release(self, grammar: str) -> None:
        self.num_users[grammar] -= 1


def request(name: str, grammar: str | None = None, tenant: str = "", n: int = 1) -> AddRequest:
    params = SamplingParams(grammar=grammar, n=n)
    return AddRequest(name, [1], params, 0, 0.0, terms=Terms(tenant))


def take(queue: GrammarQueue) -> list[CompiledRequest]:
    assert select.select([queue], [], [], 5)[0]
    return queue.take()


def test_only_requests_whose_grammar_is_not_compiled_wait():
    compiler = SlowCompiler()
    queue = GrammarQueue(compiler)
    assert queue.add(request("a", "one"))
    assert not queue.add(request("b"))
    assert queue.take() == []
    compiler.may_go_on.release()
    assert take(queue) == [(request("a", "one"), None)]
    assert not queue.add(request("c", "one"))


def test_requests_are_added_in_order_even_if_a_grammar_cannot_be_compiled():
    """The executor reports the error of such a grammar in the request's first step."""
    compiler = SlowCompiler()
    queue = GrammarQueue(compiler)
    for name, grammar in (("a", "bad"), ("b", "two"), ("c", "three")):
        assert queue.add(request(name, grammar))
    compiler.may_go_on.release(3)
    taken: list[CompiledRequest] = []
    while len(taken) < 3:
        taken += take(queue)
    assert [one.command.id for one in taken] == ["a", "b", "c"]


def test_many_grammars_of_a_tenant_delay_those_of_another_by_one():
    compiler = SlowCompiler()
    queue = GrammarQueue(compiler)
    for at in range(20):
        assert queue.add(request(f"hostile-{at}", f"slow {at}", "hostile"))
    for at in range(2):
        assert queue.add(request(f"other-{at}", f"small {at}", "other"))
    compiler.may_go_on.release(4)
    taken: list[CompiledRequest] = []
    while len(taken) < 4:
        taken += take(queue)
    names = [one.command.id for one in taken]
    compiler.may_go_on.release(18)
    assert names == ["hostile-0", "other-0", "hostile-1", "other-1"]


def test_an_abort_reaches_a_request_that_waits():
    compiler = SlowCompiler()
    queue = GrammarQueue(compiler)
    queue.add(request("a", "one"))
    queue.add(request("b", "two"))
    queue.abort("b", FinishReason.STOP)
    queue.abort("unknown", FinishReason.STOP)
    compiler.may_go_on.release()
    taken: list[CompiledRequest] = []
    while len(taken) < 2:
        taken += take(queue)
    assert taken == [(request("a", "one"), None), (request("b", "two"), FinishReason.STOP)]
    assert compiler.done == ["one"], "nobody needs the other"


def test_an_idle_engine_prepares_once():
    compiler = SlowCompiler()
    queue = GrammarQueue(compiler)
    assert queue.idle_ms == PREPARE_AFTER_MS
    queue.prepare()
    queue.prepare()
    assert queue.idle_ms is None
    compiler.may_go_on.release()
    queue.add(request("a", "one"))
    take(queue)
    assert compiler.done == ["prepared", "one"]


def test_a_grammar_is_kept_until_every_sample_of_its_requests_has_ended():
    compiler = SlowCompiler()
    queue = GrammarQueue(compiler)
    queue.add(request("a", "one", n=2))
    queue.release_ended(frozenset())
    assert compiler.num_users["one"] == 1, "its grammar is being compiled"
    compiler.may_go_on.release()
    take(queue)
    queue.add(request("b", "one"))
    queue.add(request("c"))
    queue.release_ended({"a", "a#1", "b", "c"})
    assert compiler.num_users["one"] == 2
    queue.release_ended({"a#1", "c"})
    assert compiler.num_users["one"] == 1
    queue.release_ended({"c"})
    queue.release_ended({"c"})
    assert compiler.num_users["one"] == 0
