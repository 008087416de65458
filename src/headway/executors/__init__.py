"""Executors: what computes a step plan. Tensors are allowed only below here.

Each backend is imported where it is used. In reading order:

    source.py    where a model's files are
    hardware.py  cores, memory and instruction sets
    cgroups.py   limits of the container
    spec.py      a model's shape, from its config
    fake.py      an executor without a model, for tests and the simulator

    cpu/    compiled kernels
    torch/  plain torch: eager model, sampler, weights
"""
