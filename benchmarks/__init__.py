"""Benchmark scripts whose figures the docs cite. Nothing here imports `tests`.

sim/      the scheduler on a virtual clock
live/     real servers and models
clients/  client libraries and tools of others
faults/   servers under bad inputs and failures
peers/    other engines
support/  servers and files that scripts and tests share
"""
