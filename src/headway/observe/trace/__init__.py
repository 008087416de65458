"""Traces: follows each request by its events and attributes its waits.

Must not import ledger; of metrics only `lifetimes`. In reading order:

    names.py    ids of the prompts and samples of an HTTP request
    account.py  the account of a request, as JSON
    parts.py    one prompt or sample
    audit.py    Audit: every live request, and the latest finished ones
    explain.py  an account as text
"""
