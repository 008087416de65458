"""Canonical tensor names (those of Hugging Face) and the shapes of a spec."""

from __future__ import annotations

from headway.executors.spec import ModelSpec, TensorScaling

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
ROPE_FACTORS = "rope_factors.weight"
"""In GGUF files only; see TensorScaling."""

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
O_PROJ, DOWN_PROJ = "self_attn.o_proj", "mlp.down_proj"


def layer_prefix(layer: int) -> str:
    """Return the prefix of the tensor names of a layer."""
    return f"model.layers.{layer}."


def model_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the decoder, in reading order."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, spec.hidden_size)}
    for layer in range(spec.num_layers):
        prefix = layer_prefix(layer)
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(spec).items()}
    shapes[FINAL_NORM] = (spec.hidden_size,)
    if not spec.tie_embeddings:
        shapes[HEAD] = (spec.vocab_size, spec.hidden_size)
    if isinstance(spec.rope_scaling, TensorScaling):
        shapes[ROPE_FACTORS] = (spec.head_dim // 2,)
    return shapes


def matrices(spec: ModelSpec) -> list[tuple[str, ...]]:
    """Return the tensors of each packed matrix: layers that share their input are one."""
    tables = [(EMBEDDING,)] if spec.tie_embeddings else [(EMBEDDING,), (HEAD,)]
    return tables + [
        tuple(f"{layer_prefix(layer)}{module}.weight" for module in modules)
        for layer in range(spec.num_layers)
        for modules in (QKV, (O_PROJ,), GATE_UP, (DOWN_PROJ,))
    ]


def _layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    linears = {
        "self_attn.q_proj": (q_size, hidden, spec.has_qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, spec.has_qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, spec.has_qkv_bias),
        "self_attn.o_proj": (hidden, q_size, spec.has_o_bias),
        "mlp.gate_proj": (inner, hidden, spec.has_mlp_bias),
        "mlp.up_proj": (inner, hidden, spec.has_mlp_bias),
        "mlp.down_proj": (hidden, inner, spec.has_mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (rows, columns, has_bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    if spec.has_qk_norm:
        shapes["self_attn.q_norm.weight"] = (spec.head_dim,)
        shapes["self_attn.k_norm.weight"] = (spec.head_dim,)
    return shapes
