"""The API process's side of the engine: requests in, deltas out.

Owns the live requests of the API process. Must not know HTTP or tenants' quotas. In reading order:

    inputs.py           checks a prompt and resolves its parameters
    outputs.py          tokens to text, per sample
    streams.py          one live request and what its consumer has yet to read
    waiting_streams.py  requests not admitted yet, counted per tenant
    listeners.py        whoever hears of every event
    async_engine.py     AsyncEngine: submit, deltas, abort
"""
