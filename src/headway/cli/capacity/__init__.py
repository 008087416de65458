"""What a load takes: `headway profile`, `headway simulate` and `headway plan`.

In reading order:

    profile.py          measures a machine with a model
    recording.py        a recording as the load and the machine of a simulation
    ledger.py           requests of a ledger as the load of a simulation
    simulate.py         predicts what clients of a load would see
    simulate_report.py  shows a prediction as a table, JSON and a page
    plan.py             says how many engines a load needs
    files.py            writes results
"""
