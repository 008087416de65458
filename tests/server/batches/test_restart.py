"""A server is killed at any moment: the next one answers every line once, and bills it once."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.faults.batch_kills import Kills, bodies, make_start, run
from headway.server.batches.lines import Line
from headway.server.batches.results import Result, ResultLog


async def test_killed_servers_lose_no_line_and_repeat_none(tmp_path: Path) -> None:
    start = make_start(tmp_path, None)
    outcome = await run(start, tmp_path / "ledger.db", bodies(40, 40), Kills(1, 0.4))
    assert outcome.problems == []
    assert outcome.num_kills == 1 and outcome.num_rows == 40


@pytest.mark.full
@pytest.mark.model
async def test_killed_servers_of_the_real_model(tmp_path: Path, model_path: Path) -> None:
    start = make_start(tmp_path, model_path)
    outcome = await run(start, tmp_path / "ledger.db", bodies(60, 24), Kills(5))
    assert outcome.problems == []
    assert outcome.num_kills == 5


def result(number: int, is_error: bool = False) -> Result:
    line = Line(number, f"r{number}", b"{}")
    body = json.dumps({"text": "x" * (number % 40)}).encode()
    made = Result.answered(line, f"batch_req_{number}", body)
    return Result(made.custom_id, is_error, made.text)


@given(st.integers(0, 30), st.binary(max_size=40), st.booleans(), st.randoms())
def test_a_file_that_was_cut_or_spoilt_goes_on_after_its_last_whole_line(
    tmp_path_factory, num_lines: int, junk: bytes, is_cut: bool, chance: random.Random
) -> None:
    folder = tmp_path_factory.mktemp("log")
    counted: Counter[bool] = Counter()

    def count(is_error: bool, number: int) -> None:
        counted[is_error] += number

    log = ResultLog(folder / "out", folder / "err", count)
    log.recover()
    log.append([result(number, number % 3 == 0) for number in range(num_lines)])
    path = chance.choice([folder / "out", folder / "err"])
    before = path.read_bytes()
    if is_cut and before:
        path.write_bytes(before[: chance.randrange(len(before))])
    path.write_bytes(path.read_bytes() + junk)
    counted.clear()
    again = ResultLog(folder / "out", folder / "err", count)
    again.recover()
    assert not counted, "what is found is not counted again"
    num_found = len(again.done)
    assert again.done <= {f"r{number}" for number in range(num_lines)}
    again.append(
        [
            result(number, number % 3 == 0)
            for number in range(num_lines)
            if f"r{number}" not in again.done
        ]
    )
    texts = (folder / "out").read_bytes() + (folder / "err").read_bytes()
    found = [json.loads(text)["custom_id"] for text in texts.splitlines()]
    assert sorted(found) == sorted(f"r{number}" for number in range(num_lines))
    assert again.num_completed + again.num_failed == num_lines
    assert counted.total() == num_lines - num_found
    assert sum(again.sizes) == len(texts)
