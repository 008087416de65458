"""Measurements of Headway: scripts with figures that the docs cite. Nothing here imports `tests`.

sim: the scheduler on a virtual clock. live: real servers and models. faults: servers under attack
and failure. peers: other engines. support: the servers and files that scripts and tests share.
"""
