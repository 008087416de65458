"""Batching modes on one executor: continuous, static, dynamic.

Must not import load. In reading order:

    continuous.py  the engine core
    static.py      static and dynamic batching
    modes.py       rounds of all modes, summarized
    profile.py     time of a step by part
    report.py      tables, JSON, plots
"""
