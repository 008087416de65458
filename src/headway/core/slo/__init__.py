"""Service-level objectives: who may still be admitted with targets, and how long a step may take.

Owns the step-time model, the demand of open SLO requests, and the limits of each step. Must not
touch the KV cache, the waiting queue or the state of a request. In reading order:

    steptime      seconds a step takes, fitted to the steps that were measured
    targets       due times and remaining work of one request; `met`
    demand        work of all open SLO requests by due time, in total and by tenant
    forecast      the frozen value that the engine exports after each step
    feasibility   admission control: does a request fit beside the others, or into its share?
    step_limits   token budget and running limit of one step
    pacer         ties the parts together for the scheduler
"""
