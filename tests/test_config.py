"""Settings: precedence, conversion, refusal, and what "auto" resolves to."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from headway.config import SECTIONS, Config, SchedulerConfig, ServerConfig, load_config
from headway.errors import ConfigError
from headway.resolve import Hardware, ModelFacts, Resolved, resolve, weight_bytes

GIB = 1024**3
MODEL = ModelFacts(max_model_len=2048, num_parameters=1_000_000, kv_values_per_token=1024)
MACHINE = Hardware(num_cores=4, available_bytes=8 * GIB)


def load(**settings: object) -> Config:
    return load_config(settings, environ={})


# ---------------------------------------------------------------------- precedence


def test_flags_beat_environment_beats_file_beats_defaults():
    def port(flags: dict[str, object], environ: dict[str, str], file: dict[str, object]) -> int:
        return load_config(flags, file, environ).server.port

    file: dict[str, object] = {"port": 1}
    environ = {"HEADWAY_PORT": "2"}
    assert port({}, {}, {}) == 8000
    assert port({}, {}, file) == 1
    assert port({}, environ, file) == 2
    assert port({"port": 3}, environ, file) == 3


def test_a_flag_that_was_not_given_overrides_nothing():
    assert load_config({"port": None}, {"port": 1}, {}).server.port == 1


def test_keys_may_be_spelled_with_dashes():
    assert load_config({}, {"max-num-seqs": 3}, {}).scheduler.max_num_seqs == 3


def test_an_unknown_key_is_an_error_that_names_it():
    with pytest.raises(ConfigError, match=r"unknown setting: max_num_seq$"):
        load(max_num_seq=3)


def test_foreign_environment_variables_are_left_alone():
    assert load_config({}, {}, {"PORT": "1", "HEADWAY_VENV": "x"}) == Config()


def test_a_mistyped_environment_variable_is_an_error():
    with pytest.raises(ConfigError, match="HEADWAY_MAX_NUM_SEQ"):
        load_config({}, {}, {"HEADWAY_MAX_NUM_SEQ": "4"})


SERVICE_LINKS = {
    "HEADWAY_SERVICE_HOST": "10.0.0.7",
    "HEADWAY_SERVICE_PORT": "8000",
    "HEADWAY_SERVICE_PORT_HTTP_METRICS": "8000",
    "HEADWAY_PORT": "tcp://10.0.0.7:8000",
    "HEADWAY_PORT_8000_TCP": "tcp://10.0.0.7:8000",
    "HEADWAY_PORT_8000_TCP_PROTO": "tcp",
    "HEADWAY_PORT_8000_TCP_PORT": "8000",
    "HEADWAY_PORT_8000_TCP_ADDR": "10.0.0.7",
    "HEADWAY_ENGINE_SERVICE_HOST": "10.0.0.8",
    "HEADWAY_ENGINE_PORT": "udp://10.0.0.8:53",
    "HEADWAY_ENGINE_PORT_53_UDP_ADDR": "10.0.0.8",
    "HEADWAY_ADMIN_PORT": "tcp://10.0.0.9:8001",
}
"""As Kubernetes sets them for Services named headway, headway-engine and headway-admin."""


def test_variables_of_kubernetes_services_are_ignored_with_one_warning(caplog):
    config = load_config({}, {}, {**SERVICE_LINKS, "HEADWAY_MAX_NUM_SEQS": "3"})
    assert config == load(max_num_seqs=3)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "HEADWAY_SERVICE_HOST" in record.getMessage()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HEADWAY_PROT", "1"),
        ("HEADWAY_ENGINE_PORT", "8000"),
        ("HEADWAY_PORT_HTTP_TCP", "tcp://10.0.0.7:8000"),
        ("HEADWAY_PORT_8000_TCP_NAME", "x"),
        ("HEADWAY_SERVICE", "x"),
        ("HEADWAY_HOSTS", "tcp://10.0.0.7:8000"),
    ],
)
def test_what_only_resembles_a_variable_of_a_service_is_an_error(name: str, value: str):
    with pytest.raises(ConfigError, match=f"unknown setting in the environment: {name}$"):
        load_config({}, {}, {**SERVICE_LINKS, name: value})


def test_the_environment_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADWAY_PORT", "4321")
    assert load_config({}).server.port == 4321


def test_setting_names_are_unique_over_all_sections_and_each_is_explained():
    settings = [spec for section in SECTIONS.values() for spec in fields(section)]
    assert len({spec.name for spec in settings}) == len(settings)
    assert all(spec.metadata["about"].endswith(".") for spec in settings)


def test_config_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        Config().server.port = 1  # type: ignore[misc]


# ---------------------------------------------------------------------- conversion


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2G", 2 * GIB), ("2GiB", 2 * GIB), ("1.5g", 3 * GIB // 2), ("64m", 64 << 20), ("7", 7)],
)
def test_sizes_may_have_a_unit(text: str, expected: int):
    assert load(kv_cache_memory_bytes=text).cache.kv_cache_memory_bytes == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("true", True), ("1", True), ("No", False), (False, False)]
)
def test_booleans_are_words(text: object, expected: bool):
    assert load(enable_prefix_caching=text).cache.enable_prefix_caching is expected


def test_several_values_are_separated_by_commas_or_come_as_a_list():
    assert load(api_key="a,b").server.api_key == ("a", "b")
    assert load(api_key=["a", "b"]).server.api_key == ("a", "b")


@pytest.mark.parametrize("value", ["auto", "none", "", "None"])
def test_an_optional_setting_can_be_left_open_by_name(value: str):
    assert load(max_model_len=value).model.max_model_len is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "http"),
        ("port", 80.5),
        ("port", True),
        ("port", 65536),
        ("port", -1),
        ("enable_prefix_caching", "maybe"),
        ("kv_cache_memory_bytes", "2X"),
        ("kv_cache_memory_bytes", "G"),
        ("kv_watermark", "much"),
        ("kv_watermark", 1.0),
        ("kv_watermark", -0.1),
        ("kv_watermark", "nan"),
        ("max_num_seqs", 0),
        ("max_preemptions", 0),
        ("prefill_floor", 0),
        ("prefill_floor", 512),
        ("prefill_cap", 63),
        ("block_size", 0),
        ("api_key", ""),
        ("api_key", "a,"),
        ("api_key", 5),
    ],
)
def test_a_value_that_makes_no_sense_is_refused(name: str, value: object):
    with pytest.raises(ConfigError, match=name):
        load(**{name: value})


def test_a_config_error_is_a_value_error_too():
    with pytest.raises(ValueError, match="larger than prefill_floor"):
        SchedulerConfig(max_num_batched_tokens=8, prefill_floor=8)
    with pytest.raises(ValueError, match="port"):
        ServerConfig(port=99999)


# ------------------------------------------------------------------------- resolve


def resolved(machine: Hardware = MACHINE, model: ModelFacts = MODEL, **settings: Any) -> Resolved:
    return resolve(load(**settings), model, machine)


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (MACHINE, "fp32"),
        (Hardware(4, 8 * GIB, ("avx2", "amx_bf16")), "bf16"),
        (Hardware(4, 8 * GIB, ("avx512_bf16",)), "bf16"),
        (Hardware(4, 8 * GIB, has_cuda=True), "bf16"),
    ],
)
def test_the_dtype_is_bf16_where_the_machine_is_made_for_it(machine: Hardware, expected: str):
    choice = resolved(machine)
    assert choice.dtype == expected
    assert choice.reasons[0].startswith(f"dtype {expected}")


@pytest.mark.parametrize(("asked", "expected"), [("bfloat16", "bf16"), ("FP32", "fp32")])
def test_a_dtype_that_is_asked_for_is_taken(asked: str, expected: str):
    assert resolved(dtype=asked).dtype == expected


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ConfigError, match="int3"):
        resolved(dtype="int3")


def test_the_cache_is_as_large_as_asked():
    # 16 tokens x 1024 values x 4 bytes = 64 KiB a block
    choice = resolved(kv_cache_memory_bytes="4M", max_model_len=512)
    assert (choice.num_blocks, choice.max_model_len) == (64, 512)


def test_the_cache_is_no_larger_than_every_seat_needs():
    choice = resolved(max_num_seqs=2)
    assert choice.num_blocks == 2 * 2048 // 16
    assert "room for every sequence" in choice.reasons[-1]


def test_the_cache_takes_half_of_what_the_weights_leave():
    machine = Hardware(num_cores=4, available_bytes=4_000_000 + 256 * 64 * 1024)
    choice = resolved(machine)
    assert choice.num_blocks == 128
    assert "half of the free memory" in choice.reasons[-1]


@pytest.mark.parametrize(
    ("settings", "num_slots", "why"),
    [
        ({}, 16, "a quarter of the KV cache"),
        ({"preemption_store_bytes": "1M"}, 16, "as set"),
        ({"preemption_store_bytes": 0}, 0, "as set"),
    ],
)
def test_the_offload_store_is_a_quarter_of_the_cache_or_as_asked(settings, num_slots, why):
    choice = resolved(kv_cache_memory_bytes="4M", max_model_len=512, **settings)
    assert choice.num_slots == num_slots
    assert any("offload store" in reason and why in reason for reason in choice.reasons)


def test_the_offload_store_leaves_most_of_the_memory_alone():
    machine = Hardware(num_cores=4, available_bytes=4_000_000 + 256 * 64 * 1024)
    choice = resolved(machine, kv_cache_memory_bytes="64M", max_model_len=512)
    assert choice.num_slots == machine.available_bytes // 16 // (64 * 1024)


def test_the_context_shrinks_to_the_cache_unless_it_was_asked_for():
    choice = resolved(kv_cache_memory_bytes="4M")
    assert choice.max_model_len == 64 * 16 + 1
    assert "all the KV cache holds" in choice.reasons[-1]
    with pytest.raises(ConfigError, match="needs more KV cache than the 1024 tokens"):
        resolved(kv_cache_memory_bytes="4M", max_model_len=2000)


@pytest.mark.parametrize("length", [1, 2049])
def test_the_context_is_within_the_models(length: int):
    with pytest.raises(ConfigError, match="between 2 and the model's 2048"):
        resolved(max_model_len=length)


@pytest.mark.parametrize(
    "settings", [{"kv_cache_memory_bytes": 1000}, {"machine": Hardware(1, 1000)}]
)
def test_a_cache_without_a_block_is_refused(settings: dict[str, Any]):
    with pytest.raises(ConfigError, match="room for no block"):
        resolved(**settings)


def test_threads_and_device_follow_the_machine_unless_asked_for():
    assert (resolved().num_threads, resolved().device) == (4, "cpu")
    assert resolved(Hardware(4, 8 * GIB, has_cuda=True)).device == "cuda"
    asked = resolved(num_threads=2, device="cuda:1")
    assert (asked.num_threads, asked.device) == (2, "cuda:1")


# ---------------------------------------------------------------- compiled kernels

AMX = Hardware(4, 8 * GIB, ("avx2", "avx512_bf16", "amx_bf16"), kernels="amx")
AVX2 = Hardware(4, 8 * GIB, ("avx2",), kernels="avx2")
VNNI = Hardware(4, 8 * GIB, ("avx2", "avx512_vnni"), kernels="avx512_vnni")
UNBUILT = replace(AMX, kernels=None)
INT4_FILE = replace(MODEL, kv_heads_per_token=16, quantization="int4")
MISFIT = replace(INT4_FILE, kernel_misfit="hidden size 72 is no multiple of 32")


def form(choice: Resolved) -> tuple[str, str, str | None]:
    return choice.dtype, choice.kv_dtype, choice.kernels


@pytest.mark.parametrize(
    ("machine", "model", "expected"),
    [
        (AMX, INT4_FILE, ("int4", "bf16", "amx")),
        (AMX, replace(MODEL, quantization="int8"), ("int8", "bf16", "amx")),
        (AMX, MODEL, ("bf16", "bf16", "amx")),
        (AMX, MISFIT, ("bf16", "bf16", None)),
        (UNBUILT, INT4_FILE, ("bf16", "bf16", None)),
        (AVX2, INT4_FILE, ("int4", "bf16", "avx2")),
        (AVX2, MODEL, ("fp32", "fp32", None)),
        (replace(AVX2, kernels=None), INT4_FILE, ("fp32", "fp32", None)),
        (replace(AMX, has_cuda=True), INT4_FILE, ("bf16", "bf16", None)),
    ],
)
def test_weights_stay_as_the_file_has_them_where_kernels_can_run(
    machine: Hardware, model: ModelFacts, expected: tuple[str, str, str | None]
):
    assert form(resolved(machine, model)) == expected


@pytest.mark.parametrize(
    ("machine", "model", "settings", "expected"),
    [
        (AMX, INT4_FILE, {}, "bf16"),
        (AVX2, INT4_FILE, {}, "int8"),
        (AVX2, replace(MODEL, quantization="int8"), {}, "int8"),
        (replace(AVX2, kernels="plain"), INT4_FILE, {}, "bf16"),
        (VNNI, INT4_FILE, {}, "int8"),
        (VNNI, replace(MODEL, quantization="int8"), {}, "int8"),
        (VNNI, INT4_FILE, {"kernels": "avx512"}, "int8"),
        (VNNI, INT4_FILE, {"activation_dtype": "bf16"}, "bf16"),
        (VNNI, INT4_FILE, {"dtype": "bf16"}, "bf16"),
        (VNNI, MODEL, {}, "fp32"),
        (AMX, INT4_FILE, {"activation_dtype": "INT8"}, "int8"),
        (UNBUILT, INT4_FILE, {}, "bf16"),
    ],
)
def test_activations_are_int8_where_that_is_faster(
    machine: Hardware, model: ModelFacts, settings: dict[str, Any], expected: str
):
    assert resolved(machine, model, **settings).activation_dtype == expected


@pytest.mark.parametrize(
    "settings",
    [{"activation_dtype": "fp8"}, {"activation_dtype": "int8", "dtype": "bf16"}],
)
def test_activations_that_no_kernel_has_are_an_error(settings: dict[str, Any]):
    with pytest.raises(ConfigError, match="activation_dtype must be auto, bf16 or int8 with"):
        resolved(VNNI, INT4_FILE, **settings)


def test_what_int4_has_in_int8_is_said_and_counted():
    mixed = replace(INT4_FILE, num_parameters=2**30, num_int8_parameters=2**28)
    choice = resolved(AMX, mixed)
    why = "dtype int4: 4-bit blocks of the file stay as they are; 25% of it is int8"
    assert choice.reasons[0] == why
    assert weight_bytes(mixed, "int4") == 3 * 2**28 * 0.625 + 2**28 * 1.0625
    assert weight_bytes(mixed, "int8") == 2**30 * 1.0625
    assert any("7.3 GiB free after the weights" in reason for reason in choice.reasons)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"kernels": "none"}, ("bf16", "bf16", None)),
        ({"kernels": "AVX2"}, ("int4", "bf16", "avx2")),
        ({"kernels": "plain", "dtype": "int8"}, ("int8", "bf16", "plain")),
        ({"dtype": "bf16"}, ("bf16", "bf16", "amx")),
        ({"dtype": "fp32"}, ("fp32", "fp32", None)),
        ({"kv_cache_dtype": "int8"}, ("int4", "int8", "amx")),
        ({"kv_cache_dtype": "bfloat16"}, ("int4", "bf16", "amx")),
        ({"kernels": "none", "kv_cache_dtype": "bf16"}, ("bf16", "bf16", None)),
        ({"block_size": 24}, ("bf16", "bf16", None)),
        ({"block_size": 48}, ("int4", "bf16", "amx")),
        ({"device": "cuda:0"}, ("bf16", "bf16", None)),
        ({"deterministic": True}, ("int4", "bf16", "amx")),
    ],
)
def test_what_is_asked_of_kernels_is_taken(
    settings: dict[str, Any], expected: tuple[str, str, str | None]
):
    assert form(resolved(AMX, INT4_FILE, **settings)) == expected


@pytest.mark.parametrize(
    ("machine", "model", "settings", "why"),
    [
        (UNBUILT, MODEL, {}, "they were not built"),
        (AMX, MODEL, {"kernels": "none"}, "they are turned off"),
        (AMX, MODEL, {"block_size": 24}, "block_size 24 is no multiple of 16"),
        (AMX, MODEL, {"device": "cuda:0"}, "not on cuda:0"),
        (AMX, MISFIT, {}, "hidden size 72 is no multiple of 32"),
    ],
)
def test_what_keeps_kernels_from_running_is_said(
    machine: Hardware, model: ModelFacts, settings: dict[str, Any], why: str
):
    reasons = resolved(machine, model, **settings).reasons
    assert any(reason.startswith("plain torch") and why in reason for reason in reasons)
    for dtype in ("int4", "int8"):
        with pytest.raises(ConfigError, match=rf"dtype {dtype} needs .*{why}.*use bf16 or fp32"):
            resolved(machine, model, dtype=dtype, **settings)
    with pytest.raises(ConfigError, match=f"kv_cache_dtype.*{why}"):
        resolved(machine, model, kv_cache_dtype="int8", **settings)
    with pytest.raises(ConfigError, match=f"deterministic needs.*{why}"):
        resolved(machine, model, deterministic=True, **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"kernels": "sse"},
            "kernels must be auto, none, plain, avx2, avx512, avx512_vnni or amx, got 'sse'",
        ),
        ({"kernels": "avx512"}, "kernels is avx512, which this machine lacks; use at most avx2"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype must be .*'fp8'"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype must be .*'int4'"),
        ({"kv_cache_dtype": "fp32"}, "kv_cache_dtype must be .*'fp32'"),
        ({"kv_cache_dtype": "int8", "dtype": "fp32"}, "kv_cache_dtype .*fp32"),
        ({"deterministic": True, "dtype": "fp32"}, "deterministic needs .*fp32 has none"),
    ],
)
def test_what_kernels_cannot_do_is_refused(settings: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        resolved(AVX2, INT4_FILE, **settings)


def test_an_int8_cache_has_a_scale_for_each_head_of_a_token():
    # 16 tokens x (1024 values of 1 byte + 16 scales of 4 bytes)
    choice = resolved(AMX, INT4_FILE, kv_cache_dtype="int8", kv_cache_memory_bytes="4M")
    assert choice.num_blocks == (4 << 20) // (16 * (1024 + 16 * 4))
    assert choice.kv_cache_bytes == choice.num_blocks * 16 * (1024 + 16 * 4)
    halves = resolved(AMX, INT4_FILE, kv_cache_memory_bytes="4M")
    assert halves.kv_cache_bytes == 128 * 16 * 1024 * 2


@pytest.mark.parametrize(("dtype", "num_bytes"), [("bf16", 2.0), ("int8", 1.0625), ("int4", 0.625)])
def test_smaller_weights_leave_more_for_the_cache(dtype: str, num_bytes: float):
    machine = replace(AMX, available_bytes=2_000_000 + 256 * 32 * 1024)
    left = machine.available_bytes - int(1_000_000 * num_bytes)
    assert resolved(machine, dtype=dtype).num_blocks == left // 2 // (32 * 1024)
