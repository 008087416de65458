"""SLOs: what can be promised, and how steps are sized to keep it.

Owns the step-time model, SLO admission and the limits of each step. Must not import running or the
scheduler; it reads requests and changes none but their latest start. In reading order:

    steptime.py     the step-cost model, fitted online
    feasibility.py  can a request meet its targets beside those admitted
    step_limits.py  token budget and running limit of the next step
    pacer.py        Pacer: what the scheduler uses
"""
