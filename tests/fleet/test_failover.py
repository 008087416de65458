"""Engines that die, hang or are cut off, under streams that must not notice."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.fleets import Fleet
from benchmarks.support.history import History, record
from benchmarks.support.relay import Relay
from benchmarks.support.servers import RunningServer
from tests.fleet.loads import (
    RUNNING,
    bodies,
    check,
    check_counts,
    check_fault,
    client_of,
    record_all,
    run_undisturbed,
    until_all_run,
)

STEP_S = 0.01
NUM_BLOCKS = 2048
"""Enough for all streams in one engine: a gap is then due to the fault alone."""
POISON = "\x01"
Fault = Callable[[Fleet], Awaitable[None]]


async def start(
    fleet: Fleet, num_engines: int = 3, host: dict[str, object] | None = None, **server: object
) -> RunningServer:
    """Start engines and a frontend, and wait until all engines are up."""
    for _ in range(num_engines):
        fleet.start_engine(host, step_s=STEP_S, num_blocks=NUM_BLOCKS)
    frontend = fleet.start_frontend(**server)
    await wait_up(fleet, frontend)
    return frontend


async def wait_up(fleet: Fleet, frontend: RunningServer) -> None:
    await asyncio.to_thread(frontend.wait_ready)
    await wait_log(frontend, lambda log: log.count(" is up: ") >= len(fleet.engines))


async def wait_log(
    frontend: Any, is_there: Callable[[str], bool] | str, timeout_s: float = 30.0
) -> None:
    test = is_there if callable(is_there) else lambda log: is_there in log
    deadline = time.monotonic() + timeout_s
    while not test(frontend.log):
        assert time.monotonic() < deadline, frontend.log
        await asyncio.sleep(0.02)


async def kill_engine_process(fleet: Fleet) -> None:
    fleet.engines[0].kill_engine()


async def kill_host(fleet: Fleet) -> None:
    fleet.engines[0].kill_host()


async def kill_two_hosts(fleet: Fleet) -> None:
    fleet.engines[0].kill_host()
    await asyncio.sleep(0.4)
    fleet.engines[1].kill_host()


async def stop_orderly(fleet: Fleet) -> None:
    fleet.engines[0].kill_host(signal.SIGTERM)


@pytest.mark.parametrize("fault", [kill_engine_process, kill_host, kill_two_hosts, stop_orderly])
async def test_streams_survive_the_loss_of_engines(fleet: Fleet, fault: Fault) -> None:
    server = await start(fleet)
    references = await run_undisturbed(server, bodies())
    lost_at = 0.0

    async def disturb() -> None:
        nonlocal lost_at
        lost_at = time.monotonic()
        await fault(fleet)

    histories = await check_fault(server, bodies(), references, disturb)
    await check_counts(server, references, histories)
    assert server.metric("headway_requests_resubmitted_total") >= 8
    # The engine process takes over a second to start: streams have gone on elsewhere.
    gaps = [history.longest_gap_s(lost_at) for history in histories]
    print(f"longest gap {max(gaps):.3f} s")
    assert max(gaps) < 2.0


@pytest.mark.parametrize("target", ["host", "engine process"])
async def test_streams_survive_an_engine_that_hangs(fleet: Fleet, target: str) -> None:
    server = await start(fleet, host={"engine_hang_s": 2.0})
    references = await run_undisturbed(server, bodies())
    engine = fleet.engines[0]

    async def stop() -> None:
        if target == "host":
            engine.kill_host(signal.SIGSTOP)
        else:
            engine.kill_engine(signal.SIGSTOP)

    histories = await check_fault(server, bodies(), references, stop)
    if target == "host":
        engine.kill_host(signal.SIGCONT)
        # It finds its frontend gone, frees the requests and takes the frontend back.
        await wait_log(engine, "is gone")
        await wait_log(server, lambda log: log.count(" is up: ") == 4)
    else:
        await wait_log(engine, "ended no step for 2 s")
    await check_counts(server, references, histories)


async def test_an_engine_that_comes_back_gets_requests_again(fleet: Fleet) -> None:
    server = await start(fleet, num_engines=2)
    references = await run_undisturbed(server, bodies())
    engine = fleet.engines[0]

    async def kill_and_restart() -> None:
        engine.kill_host()
        engine.restart()

    histories = await check_fault(server, bodies(), references, kill_and_restart)
    await wait_log(server, lambda log: log.count(" is up: ") == 3)
    fleet.engines[1].kill_host()
    again = await run_undisturbed(server, bodies())
    check(again, references)
    await check_counts(server, references, histories, again)


async def test_streams_survive_a_connection_that_is_cut(fleet: Fleet) -> None:
    for _ in range(2):
        fleet.start_engine(step_s=STEP_S, num_blocks=NUM_BLOCKS)
    port = int(fleet.engines[0].address.rpartition(":")[2])
    relay = Relay(port)
    server = fleet.start_frontend(engine=[relay.address, fleet.engines[1].address])
    await wait_up(fleet, server)
    references = await run_undisturbed(server, bodies())

    async def cut() -> None:
        relay.cut()

    histories = await check_fault(server, bodies(), references, cut)
    await wait_log(fleet.engines[0], "is gone")
    relay.heal()
    await wait_log(server, lambda log: log.count(" is up: ") == 3)

    async def stall() -> None:
        relay.stall()
        await asyncio.sleep(4.0)
        relay.resume()  # what the engine computed meanwhile must reach nobody

    again = await check_fault(server, bodies(400), await long_references(server), stall)
    assert again
    await wait_log(server, lambda log: log.count(" is lost: ") == 2)
    await check_counts(server, references, histories, again, again)
    relay.close()


async def long_references(server: RunningServer) -> list[History]:
    return await run_undisturbed(server, bodies(400))


async def test_all_engines_lost_is_a_pause_if_one_comes_back(fleet: Fleet) -> None:
    server = await start(fleet, num_engines=2)
    references = await run_undisturbed(server, bodies())

    async def kill_all() -> None:
        for engine in fleet.engines:
            engine.kill_host()
        fleet.engines[1].restart()

    histories = await check_fault(server, bodies(), references, kill_all)
    await check_counts(server, references, histories)


async def test_without_an_engine_a_stream_ends_with_an_error_that_names_the_limit(
    fleet: Fleet,
) -> None:
    server = await start(fleet, num_engines=1, failover_s=1.0)
    history = History()
    async with client_of(server) as client:
        running = asyncio.create_task(record(client, bodies()[0], history))
        await until_all_run([history])
        fleet.engines[0].kill_host()
        await running
    assert len(history.errors) == 1
    assert "failover_s" in server.log or "no engine continued" in history.errors[0]
    assert history.num_done == 1


async def test_a_local_restart_is_enough_for_one_engine(fleet: Fleet) -> None:
    """The host keeps the connection: the frontend waits for the engine process that follows."""
    server = await start(fleet, num_engines=1)
    references = await run_undisturbed(server, bodies(80))

    async def kill() -> None:
        fleet.engines[0].kill_engine()

    histories = await check_fault(server, bodies(80), references, kill)
    await check_counts(server, references, histories)
    assert "is lost" not in server.log


async def test_a_request_that_kills_engines_costs_two_and_is_quarantined(fleet: Fleet) -> None:
    for _ in range(3):
        fleet.start_engine(step_s=STEP_S, num_blocks=NUM_BLOCKS, poison_token=1)
    server = fleet.start_frontend(max_num_samples=8)
    await wait_up(fleet, server)
    references = await run_undisturbed(server, bodies())
    poison = History()

    async def send_poison() -> None:
        async with client_of(server) as client:
            await record(client, {"prompt": f"deadly {POISON}", "max_tokens": 50}, poison)

    histories = await check_fault(server, bodies(), references, send_poison)
    assert poison.errors and "quarantined" in server.log
    num_lost = sum("replacing the engine" in engine.log for engine in fleet.engines)
    assert num_lost <= 2, [engine.log for engine in fleet.engines]
    await check_counts(server, references, histories, num_failed=1)
    # The same request again costs no engine.
    num_before = sum(engine.log.count("replacing") for engine in fleet.engines)
    again = History()
    async with client_of(server) as client:
        await record(client, {"prompt": f"deadly {POISON}", "max_tokens": 50}, again)
    assert again.errors and "change the prompt" in again.errors[0]
    assert sum(engine.log.count("replacing") for engine in fleet.engines) == num_before


async def test_a_killed_frontend_leaves_nothing_in_the_engines(fleet: Fleet) -> None:
    first = await start(fleet, num_engines=2)
    second = fleet.start_frontend()
    await wait_up(fleet, second)
    references = await run_undisturbed(second, bodies())
    histories = [History() for _ in bodies()]
    lost = [History() for _ in bodies()]
    async with client_of(first) as client, client_of(second) as other:
        for_first = asyncio.create_task(record_all(client, bodies(), lost))
        for_second = asyncio.create_task(record_all(other, bodies(), histories))
        await asyncio.wait_for(until_all_run([*histories, *lost]), 60)
        first.process.kill()
        await asyncio.gather(for_first, for_second)
    check(histories, references)
    assert all(history.errors for history in lost)
    for engine in fleet.engines:
        await wait_log(engine, "is gone (the connection is lost)")
        (num_samples,) = re.findall(r"is gone \(.*\); (\d+) samples", engine.log)
        assert int(num_samples) >= 8
    await check_counts(second, references, histories)


async def test_engines_are_found_in_a_file_and_left_when_it_says_so(
    fleet: Fleet, tmp_path: Path
) -> None:
    engines = [fleet.start_engine(step_s=STEP_S, num_blocks=NUM_BLOCKS) for _ in range(2)]
    named = tmp_path / "engines"
    named.write_text(f"# engines of the test\n{engines[0].address}\n")
    server = fleet.start_frontend(discover=f"file:{named}")
    await asyncio.to_thread(server.wait_ready)
    assert server.log.count(" is up: ") == 1
    references = await run_undisturbed(server, bodies())

    async def change() -> None:
        named.write_text(f"{engines[1].address}\n")

    check(await check_fault(server, bodies(), references, change), references)
    await wait_log(server, f"{engines[1].address} is up")
    await wait_log(engines[0], "is gone")
    check(await run_undisturbed(server, bodies()), references)
    named.unlink()  # a source that cannot be read changes nothing
    await wait_log(server, "cannot be found")
    check(await run_undisturbed(server, bodies()[:4]), references[:4])


@pytest.mark.parametrize("failover", ["identical", "any"])
async def test_a_stream_leaves_its_numerics_class_only_if_told_to(
    fleet: Fleet, failover: str
) -> None:
    first = fleet.start_engine(step_s=STEP_S, num_blocks=NUM_BLOCKS, numerics="aaaa")
    server = fleet.start_frontend(
        engine=[first.address, f"tcp://127.0.0.1:{second_port(fleet)}"],
        failover=failover,
        failover_s=1.5,
    )
    await wait_up_one(server)
    history = History()
    async with client_of(server) as client:
        running = asyncio.create_task(record(client, bodies()[0], history))
        await until_all_run([history])
        await start_second(fleet, server)
        first.kill_host()
        await running
    if failover == "any":
        assert not history.errors and len(history.choices[0].tokens) == 250
        assert history.fingerprints == ["fp_aaaa", "fp_bbbb"]
        assert "continues in numerics class bbbb, not aaaa" in server.log
    else:
        assert history.errors and history.fingerprints == ["fp_aaaa"]
    # A request without tokens may begin anywhere.
    (fresh,) = await run_undisturbed(server, bodies()[:1])
    assert fresh.fingerprints == ["fp_bbbb"]
    assert server.metric(RUNNING) == 0


def second_port(fleet: Fleet) -> int:
    """Return the port of a second engine, of another class, that is started later."""
    engine = fleet.start_engine(step_s=STEP_S, num_blocks=NUM_BLOCKS, numerics="bbbb")
    engine.wait_ready()
    engine.stop()
    return int(engine.address.rpartition(":")[2])


async def wait_up_one(server: RunningServer) -> None:
    await asyncio.to_thread(server.wait_ready)


async def start_second(fleet: Fleet, server: RunningServer) -> None:
    fleet.engines[1].restart()
    await wait_log(server, f"{fleet.engines[1].address} is up")
