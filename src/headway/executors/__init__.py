"""Executors: compute step plans. Only this package may use tensors.

Each backend is imported where it is used. In reading order:

    source.py    finds the files of a model
    fields.py    checked fields of a model's configuration
    spec.py      shapes of a model, from its configuration
    cgroups.py   limits of the container
    hardware.py  cores, memory and instruction sets
    fake.py      an executor without a model, for tests and the simulator
    weights/     reads checkpoints
    sampling.py  what a sampler must know of each row
    rng.py       counter-based random numbers
    rope.py      frequencies of the rotary positions
    step_model.py  StepModel: interface of a model with its KV store
    grammar.py   token masks of requests with a grammar
    tokens_so_far.py  what sampling must know of earlier tokens
    executor.py  ModelExecutor: runs step plans on a StepModel
    load.py      opens a checkpoint and makes the executor
    cpu/         StepModel on the compiled kernels; needs no torch
    torch/       StepModel in plain torch
"""
