"""`headway bench`: offline batching modes and load over HTTP.

    records.py  what a run recorded, percentiles
    offline/    batching modes on an executor in this process
    load/       an open- or closed-loop client of any OpenAI-compatible server

Must not import server or cli.
"""
