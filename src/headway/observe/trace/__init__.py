"""Follows each request by its events, and explains its waits.

Must not import metrics or ledger. In reading order:

    names.py    ids of the prompts and samples of an HTTP request
    account.py  the account of a request, as JSON
    parts.py    one prompt or sample
    audit.py    Audit: every live request, and the latest finished ones
    explain.py  an account in words
"""
