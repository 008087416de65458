"""Batching modes compared on one executor: continuous, static, dynamic.

Must not import load. In reading order:

    continuous.py  the engine core
    static.py      static and dynamic batching
    modes.py       rounds of all modes, summarized
    profile.py     where the time of a step goes
    report.py      tables, JSON, plots
"""
