"""The torch executor: a plain torch model, or the compiled kernels, behind one interface.

In reading order:

    load.py           opens a checkpoint and makes the executor
    executor.py       TorchExecutor: runs step plans
    step_model.py     StepModel: interface of a model with its KV store
    eager.py          StepModel in plain torch
    inputs.py         flat tensors of one forward pass
    model.py          the decoder
    layers.py         linear, norm, rotary, activation
    rope.py           rotary positions
    attention.py      attention through block tables
    kv_store.py       keys and values in blocks
    offload_store.py  KV blocks of preempted requests, in host memory
    sampler.py        logits to tokens
    rng.py            counter-based random numbers
    weights/          reads checkpoints
"""
