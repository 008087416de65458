"""Engines that die, hang or are cut off, under streams that must not notice."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.support.fleet_loads import (
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
from benchmarks.support.fleets import Fleet, RunningEngine
from benchmarks.support.history import History, record
from benchmarks.support.relay import Relay
from benchmarks.support.servers import RunningServer
from tests.fleet.conftest import NUM_BLOCKS, STEP_S, Trio, wait_log, wait_up

POISON = "\x01"
MAX_GROWTH_BYTES = 64 * 1024**2
Fault = Callable[[Fleet], Awaitable[None]]


async def start(fleet: Fleet, num_engines: int, **server: object) -> RunningServer:
    """Start engines and a frontend, and wait until all engines are up."""
    for _ in range(num_engines):
        fleet.start_engine(step_s=STEP_S, num_blocks=NUM_BLOCKS)
    frontend = fleet.start_frontend(**server)
    await wait_up(fleet, frontend)
    return frontend


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


@pytest.mark.parametrize(
    "fault",
    [
        kill_engine_process,
        kill_host,
        pytest.param(kill_two_hosts, marks=pytest.mark.full),
        pytest.param(stop_orderly, marks=pytest.mark.full),
    ],
)
async def test_streams_survive_the_loss_of_engines(trio: Trio, fault: Fault) -> None:
    lost_at = 0.0
    num_before = trio.server.metric("headway_requests_resubmitted_total")

    async def disturb() -> None:
        nonlocal lost_at
        lost_at = time.monotonic()
        await fault(trio.fleet)

    histories = await trio.check_fault(disturb)
    num_resubmitted = trio.server.metric("headway_requests_resubmitted_total") - num_before
    # Engines have equal numbers of sequences, not of requests, and stop strings end some early.
    assert num_resubmitted >= len(histories) // 8
    # The engine process takes over a second to start: streams have gone on elsewhere.
    gaps = [history.longest_gap_s(lost_at) for history in histories]
    print(f"longest gap {max(gaps):.3f} s")
    assert max(gaps) < 2.0


@pytest.mark.parametrize("target", ["host", pytest.param("process", marks=pytest.mark.full)])
async def test_streams_survive_an_engine_that_hangs(trio: Trio, target: str) -> None:
    engine = trio.fleet.engines[0]

    async def stop() -> None:
        if target == "host":
            engine.kill_host(signal.SIGSTOP)
        else:
            engine.kill_engine(signal.SIGSTOP)

    await trio.check_fault(stop)
    if target == "host":
        engine.kill_host(signal.SIGCONT)
        # It finds its frontend gone, frees the requests and takes the frontend back.
        await wait_log(engine, "is gone")
    else:
        await wait_log(engine, "ended no step for 2 s")
    await trio.mend()


async def test_a_frontend_that_stops_or_dies_harms_nobody(trio: Trio) -> None:
    await trio.mend()
    second = trio.fleet.start_frontend(routing="least-loaded")
    await wait_up(trio.fleet, second)
    hosts = [psutil.Process(engine.process.pid) for engine in trio.fleet.engines]
    num_gone = [engine.log.count("is gone") for engine in trio.fleet.engines]
    histories, stopped = ([History() for _ in trio.requests] for _ in range(2))
    async with client_of(trio.server) as client, client_of(second) as other:
        running = asyncio.create_task(record_all(client, trio.requests, histories))
        paused = asyncio.create_task(record_all(other, trio.requests, stopped))
        await asyncio.wait_for(until_all_run([*histories, *stopped]), 60)
        sizes = [host.memory_info().rss for host in hosts]
        second.process.send_signal(signal.SIGSTOP)
        await running
        for engine, before in zip(trio.fleet.engines, num_gone, strict=True):
            await wait_log(engine, lambda log, before=before: log.count("is gone") > before)
        growths = [host.memory_info().rss - size for host, size in zip(hosts, sizes, strict=True)]
        second.process.send_signal(signal.SIGCONT)
        # It finds its connections lost, connects again and goes on where it was.
        await asyncio.wait_for(paused, 60)
        check(histories, trio.references)
        check(stopped, trio.references)
        assert max(growths) < MAX_GROWTH_BYTES

        lost = [History() for _ in trio.requests]
        dying = asyncio.create_task(record_all(other, trio.requests, lost))
        await asyncio.wait_for(until_all_run(lost), 60)
        second.process.kill()
        await dying
    cut = [history for history in lost if not history.num_done]  # a stop string ended the others
    assert len(cut) >= len(lost) // 2 and all(history.errors for history in cut)
    num_samples = 0
    for engine in trio.fleet.engines:
        await wait_log(engine, lambda log: log.count("is gone (the connection is lost)") >= 2)
        num_samples += int(re.findall(r"is gone \(.*\); (\d+) samples", engine.log)[-1])
    # One engine may have ended its own by then.
    assert num_samples > 0
    check(await run_undisturbed(trio.server, trio.requests[:4]), trio.references[:4])


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
async def test_all_engines_lost_is_a_pause_if_one_comes_back(fleet: Fleet) -> None:
    server = await start(fleet, num_engines=2)
    references = await run_undisturbed(server, bodies())

    async def kill_all() -> None:
        for engine in fleet.engines:
            engine.kill_host()
        fleet.engines[1].restart()

    histories = await check_fault(server, bodies(), references, kill_all)
    await check_counts(server, references, histories)


@pytest.mark.full
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


@pytest.mark.full
async def test_a_local_restart_is_enough_for_one_engine(fleet: Fleet) -> None:
    """The host keeps the connection: the frontend waits for the engine process that follows."""
    server = await start(fleet, num_engines=1)
    references = await run_undisturbed(server, bodies(80))

    async def kill() -> None:
        fleet.engines[0].kill_engine()

    histories = await check_fault(server, bodies(80), references, kill)
    await check_counts(server, references, histories)
    assert "is lost" not in server.log


@pytest.mark.full
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


async def engine_of_all(fleet: Fleet, server: RunningServer) -> RunningEngine:
    """Wait until one engine has all requests that run, and return it."""
    async with asyncio.timeout(5), httpx.AsyncClient(verify=False) as client:
        while True:
            text = (await client.get(f"{server.admin_url}/metrics")).text
            found = re.findall(r'headway_engine_requests_running{.*"(tcp:[^"]*)".*} [1-9]', text)
            if len(found) == 1:
                return next(one for one in fleet.engines if one.address == found[0])
            await asyncio.sleep(0.02)


@pytest.mark.full
async def test_hosts_lost_one_after_another_quarantine_nobody(fleet: Fleet) -> None:
    """A request that moves from one to the next, with steps too long to clear it between two."""
    for _ in range(3):
        fleet.start_engine(step_s=0.2, num_blocks=NUM_BLOCKS)
    server = fleet.start_frontend()
    await wait_up(fleet, server)
    requests = bodies(24)[:1]
    references = await run_undisturbed(server, requests)

    async def kill_three() -> None:
        killed = []
        for _ in range(2):
            killed.append(await engine_of_all(fleet, server))
            killed[-1].kill_host()
        await asyncio.sleep(0.6)
        (last,) = (one for one in fleet.engines if one not in killed)
        last.kill_host()
        last.restart()

    await check_fault(server, requests, references, kill_three)
    assert "quarantined" not in server.log


@pytest.mark.full
async def test_poison_at_one_frontend_quarantines_nobody_at_another(fleet: Fleet) -> None:
    """Both try their requests in the same engine: only the culprit is quarantined."""
    host: dict[str, object] = {"max_engine_restarts": 50}
    fleet.start_engine(host, step_s=STEP_S, num_blocks=NUM_BLOCKS, poison_token=1)
    servers = [fleet.start_frontend() for _ in range(2)]
    for server in servers:
        await wait_up(fleet, server)
    references = await run_undisturbed(servers[0], bodies(20))
    errors: list[str] = []
    is_over = False

    async def keep_busy(server: RunningServer, number: int) -> None:
        async with client_of(server) as client:
            while not is_over:
                check([await record(client, bodies(20)[number])], [references[number]])

    async def poison(number: int) -> list[str]:
        async with client_of(servers[0]) as client:
            body = {"prompt": f"deadly {number} {POISON}", "max_tokens": 50}
            return (await record(client, body)).errors

    clients = [
        asyncio.create_task(keep_busy(server, number)) for server in servers for number in range(4)
    ]
    for number in range(4):
        errors += await poison(number)
    is_over = True
    await asyncio.gather(*clients)
    assert [("failed twice" in one) for one in errors] == [True] * 4, errors
    assert fleet.engines[0].log.count("has quarantined") == 4


@pytest.mark.full
async def test_a_quarantine_is_known_to_every_frontend(fleet: Fleet) -> None:
    """Two engines are lost at most, however many frontends get the request, now or later."""
    for _ in range(3):
        fleet.start_engine(step_s=STEP_S, num_blocks=NUM_BLOCKS, poison_token=1)
    servers = [fleet.start_frontend() for _ in range(2)]
    for server in servers:
        await wait_up(fleet, server)

    async def send(server: RunningServer) -> list[str]:
        async with client_of(server) as client:
            body = {"prompt": f"deadly {POISON}", "max_tokens": 50}
            return (await record(client, body)).errors

    (error,) = await send(servers[0])
    assert "failed twice" in error
    num_lost = sum("replacing the engine" in engine.log for engine in fleet.engines)
    num_before = sum(engine.log.count("replacing") for engine in fleet.engines)
    assert num_lost <= 2, [engine.log for engine in fleet.engines]
    for engine in fleet.engines:
        await wait_log(engine, "has quarantined 1 requests")
    (error,) = await send(servers[1])
    assert "change the prompt" in error
    # A host that is started anew hears of it from its frontends, a new frontend from the hosts.
    for engine in fleet.engines:
        engine.kill_host()
        engine.restart()
        await wait_log(engine, "has quarantined 1 requests")
    newest = fleet.start_frontend()
    await wait_up(fleet, newest)
    (error,) = await send(newest)
    assert "change the prompt" in error
    assert sum(engine.log.count("replacing") for engine in fleet.engines) == 0 < num_before
    (fresh,) = await run_undisturbed(newest, bodies(20)[:1])
    assert fresh.num_tokens == 20


@pytest.mark.full
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


@pytest.mark.full
@pytest.mark.parametrize("failover", ["identical", "any"])
async def test_a_stream_leaves_its_numerics_class_only_if_told_to(
    fleet: Fleet, tmp_path: Path, failover: str
) -> None:
    first = fleet.start_engine(step_s=0.02, num_blocks=NUM_BLOCKS, numerics="aaaa")
    second = fleet.start_engine(step_s=0.002, num_blocks=NUM_BLOCKS, numerics="bbbb").wait_ready()
    named = tmp_path / "engines"
    named.write_text(f"{first.address}\n")
    server = fleet.start_frontend(discover=f"file:{named}", failover=failover, failover_s=1.5)
    await asyncio.to_thread(server.wait_ready)
    history = History()
    async with client_of(server) as client:
        # 12 s in the first engine: it is killed long before the stream ends.
        running = asyncio.create_task(record(client, bodies(600)[0], history))
        await until_all_run([history])
        named.write_text(f"{first.address}\n{second.address}\n")
        await wait_log(server, f"{second.address} is up")
        first.kill_host()
        await running
    if failover == "any":
        assert not history.errors and len(history.choices[0].tokens) == 600
        assert history.fingerprints == ["fp_aaaa", "fp_bbbb"]
        assert "continues in numerics class bbbb, not aaaa" in server.log
    else:
        assert history.errors and history.fingerprints == ["fp_aaaa"]
    # A request without tokens may begin anywhere.
    (fresh,) = await run_undisturbed(server, bodies()[:1])
    assert fresh.fingerprints == ["fp_bbbb"]
    assert server.metric(RUNNING) == 0
