"""The API process's side of the engines: requests in, deltas out.

Owns the live requests of the API process. Must not know HTTP or tenants' quotas. In reading order:

    inputs.py           checks a prompt and resolves its parameters
    transcript.py       output of a resumable request so far, and how far it was read
    outputs.py          tokens to text, per sample
    streams.py          one live request and its unread deltas
    waiting_streams.py  requests not admitted yet, counted per tenant
    suspects.py         which requests may have taken an engine down, and their trials
    link.py             the port to one engine, here or on another machine
    replica.py          one engine: its link, its requests, its forecast
    eligible.py         which engines may have a request
    placement.py        which engine gets a request, and when
    routed_placement.py the same by a router, for a frontend with several engines
    adoption.py         requests of other frontends that this process continues
    delivery.py         the events of reports to the live requests
    listeners.py        passes every batch of events to observers and admission
    async_engine.py     AsyncEngine: submit, deltas, abort, failover
"""
