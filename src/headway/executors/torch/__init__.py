"""A model in plain torch: any device, fp32 or bf16, and the reference of the compiled kernels.

In reading order:

    eager.py          StepModel in plain torch
    inputs.py         flat tensors of one forward pass
    model.py          the decoder
    layers.py         linear, norm, rotary, activation
    rope.py           rotary positions
    attention.py      attention through block tables
    kv_store.py       keys and values in blocks
    offload_store.py  KV blocks of preempted requests, in host memory
    sampler.py        logits to tokens
"""
