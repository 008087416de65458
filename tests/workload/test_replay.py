from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from headway.errors import ConfigError
from headway.workload import Bounds, Replay, Scale, Trace, TraceRow, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.4799600,3180,8
2023-11-16 18:17:07.9799600,110,0
"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 1300, "output_length": 50, "hash_ids": [0, 1, 2]},
    {"timestamp": 0, "input_length": 1024, "output_length": 9, "hash_ids": [0, 1]},
    {"timestamp": 3000, "input_length": 600, "output_length": 7, "hash_ids": [0, 5]},
    {"timestamp": 3000, "input_length": 600, "output_length": 7, "hash_ids": [8, 9]},
]


@pytest.fixture
def azure(tmp_path: Path) -> Trace:
    file = tmp_path / "azure.csv"
    file.write_text(AZURE)
    return read_trace(file)


@pytest.fixture
def mooncake(tmp_path: Path) -> Trace:
    file = tmp_path / "mooncake.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in MOONCAKE) + "\n")
    return read_trace(file)


def test_azure_times_count_from_the_first_request(azure: Trace):
    assert [row.at for row in azure.rows] == pytest.approx([0.0, 0.5, 4.0])
    assert [row.num_prompt_tokens for row in azure.rows] == [4808, 3180, 110]
    assert azure.mean_rate == pytest.approx(0.75)


def test_times_in_buckets_are_spread_within_them(mooncake: Trace):
    jittered = mooncake.jittered(Random(0))
    assert [row.at for row in mooncake.rows] == [0.0, 0.0, 3.0, 3.0]
    times = [row.at for row in jittered.rows]
    assert times == sorted(times)
    assert [int(at // 3) for at in times] == [0, 0, 1, 1]
    assert len(set(times)) == 4
    assert jittered == mooncake.jittered(Random(0)) != mooncake.jittered(Random(1))
    many = Trace(tuple(TraceRow(0.0, 1, 1) for _ in range(5000)), 3.0).jittered(Random(0))
    assert sum(row.at for row in many.rows) / 5000 == pytest.approx(1.5, abs=0.05)


def test_lengths_are_scaled_and_clipped(azure: Trace):
    scale = Scale(length=0.1, prompt=Bounds(1, 400), output=Bounds(1, 100))
    items = list(Replay(azure, scale).items(0))
    assert [len(item.prompt_token_ids) for item in items] == [400, 318, 11]
    assert [item.num_output_tokens for item in items] == [1, 1, 1]


def test_time_is_scaled_by_a_factor_or_to_a_rate(azure: Trace):
    assert [i.at for i in Replay(azure, Scale(time=0.5)).items(0)] == pytest.approx([0, 0.25, 2])
    replay = Replay(azure).with_rate(3.0)
    assert replay.mean_rate == pytest.approx(3.0)
    assert [item.at for item in replay.items(0)] == pytest.approx([0.0, 0.125, 1.0])


def by_length(replay: Replay, seed: int = 0) -> dict[int, tuple[int, ...]]:
    return {len(item.prompt_token_ids): item.prompt_token_ids for item in replay.items(seed)}


def test_prompts_share_tokens_where_they_share_hash_ids(mooncake: Trace):
    prompts = [item.prompt_token_ids for item in Replay(mooncake).items(0)]
    by_output = {
        item.num_output_tokens: item.prompt_token_ids for item in Replay(mooncake).items(0)
    }
    assert sorted(map(len, prompts)) == [600, 600, 1024, 1300]
    long, middle = by_output[50], by_output[9]
    assert long[:1024] == middle
    six_hundreds = [prompt for prompt in prompts if len(prompt) == 600]
    same_start = [prompt[:512] == long[:512] for prompt in six_hundreds]
    assert sorted(same_start) == [False, True]
    assert all(prompt[512:] != long[512:600] for prompt in six_hundreds)


def test_blocks_shrink_with_the_lengths(mooncake: Trace):
    prompts = by_length(Replay(mooncake, Scale(length=0.125)))
    assert set(prompts) == {162, 128, 75}
    assert prompts[162][:128] == prompts[128]


def test_another_seed_gives_other_tokens(mooncake: Trace):
    assert list(Replay(mooncake).items(4)) == list(Replay(mooncake).items(4))
    assert by_length(Replay(mooncake), 4)[1300] != by_length(Replay(mooncake), 5)[1300]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "time,in,out\n1,2,3\n", "is not a trace; accepted"),
        ("a.csv", "", "is not a trace"),
        ("a.csv", AZURE.splitlines()[0] + "\n", "no requests"),
        ("a.csv", AZURE + "yesterday,1,2\n", "line 5"),
        ("a.csv", AZURE + "2023-11-16 18:17:08,-1,2\n", "line 5: a length is below 0"),
        ("a.jsonl", '{"timestamp": 0}\n', "line 1.*input_length"),
        ("a.jsonl", '{"timestamp": 0,\n', "line 1"),
    ],
)
def test_a_broken_trace_is_named_by_its_line(tmp_path: Path, name: str, text: str, said: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_trace(tmp_path / name)


def test_a_trace_at_one_moment_has_no_rate():
    with pytest.raises(ConfigError, match="has no rate"):
        _ = Trace((TraceRow(0.0, 1, 1),)).mean_rate
