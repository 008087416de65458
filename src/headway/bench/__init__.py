"""`headway bench`: offline batching modes, and load over HTTP.

Must not import server or cli. In reading order:

    records.py  records of a run, percentiles
    offline/    batching modes on an executor in this process
    load/       open- or closed-loop client of any OpenAI-compatible server
"""
