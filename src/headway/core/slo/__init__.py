"""SLOs: admission control, and step limits that meet the admitted targets.

Owns the step-time model, SLO admission and the limits of each step. Must not import running or the
scheduler. It reads requests and writes only their planned start. In reading order:

    steptime.py       the step-time model, fitted online
    targets.py        due times and remaining work of one request
    demand.py         a table of work by due time
    open_requests.py  the live requests with targets, and their demand
    forecast.py       the state that the engine exports after each step
    feasibility.py    can the targets of a request be met
    step_limits.py    token budget and running limit of the next step
    pacer.py          Pacer: the limits of each step, and deferred decodes
    admission.py      SloAdmission: judges requests, makes the forecast
    forecast_reader.py  early refusals by that forecast, outside the engine
"""
