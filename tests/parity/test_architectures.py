"""Tiny random checkpoints of every supported family against transformers, in fp32."""

from __future__ import annotations

import pytest
import torch

from headway.clock import SystemClock
from headway.core.params import SamplingParams
from headway.core.plan import NewRequest, Sample, ScheduledRequest, StepPlan
from headway.executors.load import ModelExecutor, open_checkpoint
from headway.executors.source import locate
from headway.executors.step_model import Span
from headway.executors.torch.eager import EagerModel, load_decoder
from headway.executors.torch.inputs import make_inputs
from headway.executors.torch.kv_store import KVStore

VOCAB = 199
NUM_OUTPUTS = 32
# A wide initialization spreads the logits, so that no argmax hangs on the last bit.
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
SMOL = {
    "hidden_size": 72,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
}
QWEN2_WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}

MODELS = {
    "llama": ("Llama", {}),
    "llama-llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("Llama", {"rope_parameters": LINEAR}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "smollm2-shaped": ("Llama", SMOL),
    "mistral-window": ("Mistral", {"sliding_window": 9}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", QWEN2_WINDOW),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Products this small only lose time to a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=MODELS, name="pair", scope="module")
def saved_pair(request, tmp_path_factory):
    """The same weights in transformers and here."""
    import transformers  # takes seconds, in every process that collects tests

    family, extra = MODELS[request.param]
    config = getattr(transformers, f"{family}Config")(**{**BASE, **extra})
    torch.manual_seed(7)
    oracle = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.25)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    folder = tmp_path_factory.mktemp("checkpoint")
    oracle.save_pretrained(folder)
    return oracle, load_decoder(open_checkpoint(locate(str(folder))), "fp32")


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        for length in (1, 5, 16, 41)
    ]


@torch.inference_mode()
@pytest.mark.parametrize("chunk", [64, 6])
def test_logits_of_every_position(pair, chunk):
    oracle, decoder = pair
    store = KVStore(decoder.spec, 32, 4, decoder.dtype, decoder.device)
    tables = [list(range(20, 6, -1)), list(range(31, 20, -1))]
    tokens = [prompts()[3], prompts()[2]]
    rows: list[list[torch.Tensor]] = [[], []]
    for start in range(0, 41, chunk):
        spans = [
            (which, Span(ids[start : start + chunk], start, table))
            for which, (ids, table) in enumerate(zip(tokens, tables, strict=True))
            if start < len(ids)
        ]
        inputs = make_inputs([span for _, span in spans], decoder.spec.windows, store)
        logits = decoder.logits(decoder.forward(inputs, store))
        for (which, span), row in zip(spans, inputs.rows, strict=True):
            rows[which].append(logits[row : row + len(span.token_ids)])
    for ids, parts in zip(tokens, rows, strict=True):
        expected = oracle(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", [64, 7])
def test_greedy_tokens(pair, chunk):
    oracle, decoder = pair
    expected = [
        oracle.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=NUM_OUTPUTS,
            do_sample=False,
        )[0, len(ids) :].tolist()
        for ids in prompts()
    ]
    executor = ModelExecutor(EagerModel(decoder, 96, 4), 128, SystemClock())
    assert generate(executor, prompts(), chunk) == expected


def generate(executor: ModelExecutor, prompts: list[list[int]], chunk: int) -> list[list[int]]:
    """Continuous batching at its plainest: everyone advances by at most `chunk` each step."""
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUTS)
    block_size = executor.capacity().block_size
    free = list(range(executor.capacity().num_blocks))
    tokens = [list(prompt) for prompt in prompts]
    computed, num_blocks = [0] * len(prompts), [0] * len(prompts)
    step = 0
    while any(len(known) < len(p) + NUM_OUTPUTS for known, p in zip(tokens, prompts, strict=True)):
        scheduled = []
        for i, known in enumerate(tokens):
            start, end = computed[i], min(len(known), computed[i] + chunk)
            blocks = tuple(free.pop() for _ in range(-(-end // block_size) - num_blocks[i]))
            new = NewRequest(params, 0, 0, tuple(known), len(prompts[i])) if start == 0 else None
            ids = tuple(known[start:end])
            scheduled.append(ScheduledRequest(str(i), start, ids, blocks, end == len(known), new))
            computed[i], num_blocks[i] = end, num_blocks[i] + len(blocks)
        step += 1
        result = executor.collect(executor.submit(StepPlan(step, tuple(scheduled))))
        for known, outcome in zip(tokens, result.outcomes, strict=True):
            if isinstance(outcome, Sample):
                known.extend(outcome.token_ids)
    return [known[len(p) : len(p) + NUM_OUTPUTS] for known, p in zip(tokens, prompts, strict=True)]
