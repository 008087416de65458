"""What a recorded engine did, and served requests as a load. In reading order:

    observed.py  steps and requests of a recorded engine
    routed.py    requests of a recorded router
    items.py     a recorded request as an item of a load
    load.py      the requests of a recording as a load
    accounts.py  the requests of a ledger as a load

Only items.py is free of msgspec.
"""
