"""Profiles by datasheet: step times by hand, memory, names, labels; and loops against them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.sim.datasheets import (
    Loop,
    MeasuredLoop,
    expected_tpot_s,
    fit_constants,
    fitted_groups,
    read_loops,
    simulate_loop,
)
from headway.core.slo.steptime import StepShape
from headway.errors import ConfigError
from headway.sim.profile.catalog import find_profile
from headway.sim.profile.datasheet import GPUS, REACHED, Datasheet, Reached
from headway.sim.profile.machine import read_profile, write_profile

PLAIN = Reached(compute=0.5, bandwidth=0.5, per_layer_s=0.0, per_row_s=0.0, all_reduce_s=0.0)
SMALL = Loop("h100", "llama-3.1-8b", "bf16", 1, 512, 40, 8)


def test_a_step_reads_the_weights_or_multiplies_them_whichever_takes_longer():
    fit = Datasheet.parse("datasheet:h100/llama-3.1-8b").step_fit(PLAIN)
    reading_s = 2 * 8.03e9 / (0.5 * 3.35e12)
    assert fit.predict(StepShape(1)) == pytest.approx(reading_s)
    assert fit.predict(StepShape(64)) == pytest.approx(reading_s)
    multiplying_s = 4096 * 2 * 8.03e9 / (0.5 * 989e12)
    assert fit.predict(StepShape(0, 4096)) == pytest.approx(multiplying_s, rel=1e-3)
    context = StepShape(64, 0, 100_000)  # 128 KiB each
    assert fit.predict(context) == pytest.approx(reading_s + 100_000 * 2**17 / (0.5 * 3.35e12))


def test_a_format_helps_to_multiply_only_where_the_gpu_has_it():
    def prefill_s(name: str) -> float:
        return Datasheet.parse(name).step_fit(PLAIN).predict(StepShape(0, 8192))

    bf16_s = prefill_s("datasheet:h100/8B")
    assert prefill_s("datasheet:h100/8B/fp8") == pytest.approx(bf16_s / 2, rel=0.02)
    assert prefill_s("datasheet:h100/8B/int4") == pytest.approx(bf16_s, rel=0.001)


def test_two_gpus_are_faster_and_not_twice_as_fast():
    one = Datasheet.parse("datasheet:h100/llama-3.1-8b").step_fit()
    two = Datasheet.parse("datasheet:2xh100/llama-3.1-8b").step_fit()
    shape = StepShape(16, 0, 16_000)
    assert one.predict(shape) / 2 < two.predict(shape) < one.predict(shape)


def test_the_kv_cache_is_what_the_weights_leave():
    # vLLM found 2588 blocks on the same card; it keeps a little more for itself.
    capacity = Datasheet.parse("datasheet:rtx-4090/llama-3.1-8b").capacity()
    assert capacity.num_blocks == pytest.approx(2588, rel=0.1)
    assert capacity.max_model_len == 16 * capacity.num_blocks
    with pytest.raises(ConfigError, match="takes 141 GB; 1 x h100 has 76 GB"):
        Datasheet.parse("datasheet:h100/llama-3.1-70b").capacity()
    assert Datasheet.parse("datasheet:2xh100/llama-3.1-70b/fp8").capacity().num_blocks > 10_000


def test_a_profile_by_datasheet_says_so_and_has_a_range(tmp_path: Path):
    profile = find_profile("datasheet:a100/13B/int8")
    assert profile.caveat.startswith("datasheet, not measured")
    assert "measurements of other GPUs (there are none of a100), TPOT was off" in profile.caveat
    assert profile.drift > 0.1
    path = tmp_path / "machine.json"
    write_profile(path, profile)
    assert read_profile(path) == profile


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("datasheet:", "is not datasheet:GPU/MODEL"),
        ("datasheet:h100", "is not datasheet:GPU/MODEL"),
        ("datasheet:h100/8B/fp8/more", "is not datasheet:GPU/MODEL"),
        ("datasheet:abacus/8B", "no datasheet of GPU 'abacus'; there are: a100, h100"),
        ("datasheet:0xh100/8B", "no datasheet of GPU '0xh100'"),
        ("datasheet:h100/llama", "no sizes of model 'llama'"),
        ("datasheet:h100/0b", "no sizes of model '0b'"),
        ("datasheet:h100/8B/fp7", "unknown format 'fp7'; one of bf16, fp8"),
        ("datasheet:l4/70B", "name more GPUs"),
    ],
)
def test_a_mistake_in_a_name_is_named(name: str, message: str):
    with pytest.raises(ConfigError, match=message):
        find_profile(name)


def test_every_gpu_serves_a_small_model():
    for name in GPUS:
        assert find_profile(f"datasheet:{name}/llama-3.2-1b").capacity.num_blocks > 1000


def test_a_simulated_loop_has_the_tpot_of_its_closed_form():
    found = simulate_loop(SMALL)
    assert found is not None
    assert found.tpot_s == pytest.approx(expected_tpot_s(SMALL, REACHED), rel=0.05)
    assert simulate_loop(replace(SMALL, model="llama-3.1-70b")) is None


def test_fitted_constants_are_those_that_made_the_rows():
    true = Reached(compute=0.4, bandwidth=0.9, per_layer_s=90e-6)
    loops = [
        replace(SMALL, num_gpus=num_gpus, num_prompt=num_prompt, num_output=num, concurrency=many)
        for num_gpus in (1, 2)
        for num_prompt, num in ((128, 256), (1024, 64), (4096, 32))
        for many in (1, 16, 64)
    ]
    found = fit_constants([MeasuredLoop(one, 0.0, expected_tpot_s(one, true)) for one in loops])
    for one in loops:
        tpot_s = expected_tpot_s(one, true)
        assert expected_tpot_s(one, found) == pytest.approx(tpot_s, rel=0.05)


def test_rows_of_other_models_and_modes_are_left_out(tmp_path: Path):
    head = (
        "silicon_data_source,model_path,system,mode,isl,osl,gemm_quant_mode,tp_size,"
        "silicon_ttft_ms,silicon_tpot_ms\n"
    )
    row = "x; silicon_concurrency=8; y,{},h100_sxm,{},1024,128,{},2,50.0,9.0\n"
    path = tmp_path / "gpu_measured.csv"
    path.write_text(
        head
        + row.format("Qwen/Qwen3-32B", "agg", "fp8_block")
        + row.format("Qwen/Qwen3-32B", "disagg", "fp8")
        + row.format("deepseek-ai/DeepSeek-R1", "agg", "fp8")
        + row.format("meta-llama/Llama-3.1-70B", "agg", "")
    )
    first, second = read_loops(path)
    assert first == MeasuredLoop(Loop("h100", "qwen3-32b", "fp8", 2, 1024, 128, 8), 0.05, 0.009)
    assert fitted_groups([first, second]) == {second.loop.group}
