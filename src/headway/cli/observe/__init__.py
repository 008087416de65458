"""What servers did, and for whom: `headway explain`, `headway trace` and `headway usage`.

In reading order:

    ledger.py   opens the ledger for a command, and reads its flags
    explain.py  why a request waited
    trace.py    records a server for a trace viewer
    usage.py    tokens and time by tenant
"""
