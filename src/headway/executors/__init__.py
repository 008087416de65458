"""Executors: compute step plans. Only this package may use tensors.

Each backend is imported where it is used. In reading order:

    source.py    finds the files of a model
    fields.py    checked fields of a model's configuration
    spec.py      shapes of a model, from its configuration
    cgroups.py   limits of the container
    hardware.py  cores, memory and instruction sets
    fake.py      an executor without a model, for tests and the simulator
    torch/       the torch executor: plain model, sampler, weights
    cpu/         compiled CPU kernels
"""
