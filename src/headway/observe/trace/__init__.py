"""Traces: the account of a request, as JSON and as text.

Must not import metrics, ledger or the request table. In reading order:

    names.py    ids of the prompts and samples of an HTTP request
    account.py  the account of a request, as JSON
    explain.py  an account as text
    pieces.py   an account cut into waits, prefill and decode
    export.py   what a server sends to `headway trace`
    chrome.py   a trace file that Perfetto opens
"""
