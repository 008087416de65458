"""Real client libraries against a real server: `python -m benchmarks.clients --help`.

Owns the table of docs/clients.md.

catalog.py       the clients: packages with versions, flags of the server, what is run
environments.py  one virtual environment per client
runner.py        a server, the checks of a client, their results
report.py        the table, and what failed
uses/            the checks, one module per client
"""
