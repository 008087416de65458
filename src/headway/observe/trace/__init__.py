"""Traces: the account of a request, as JSON and as text.

Must not import metrics, ledger or the request table. In reading order:

    names.py    ids of the prompts and samples of an HTTP request
    account.py  the account of a request, as JSON
    explain.py  an account as text
"""
