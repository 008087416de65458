"""The request table: the state of every live request, from events.

Must not import metrics or ledger. In reading order:

    parts.py  one prompt or sample
    table.py  RequestTable: every live request, and the latest finished ones
    steps.py  the latest steps of all engines
"""
