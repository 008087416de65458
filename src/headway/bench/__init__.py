"""`headway bench`: offline batching modes, and load over HTTP.

Must not import server or cli. In reading order:

    steal.py    processor time that the hypervisor took
    options.py  options of several commands: sampling
    records.py  records of a run
    offline/    batching modes on an executor in this process
    load/       open- or closed-loop client of any OpenAI-compatible server
"""
