"""The waiting queue: which request is admitted next, and why each of the others waits.

Owns the order of waiting requests, aging, suspension of tenants at their KV quota, service accounts
of tenants, and the attribution of waiting time to causes. Takes no blocks and changes no request's
state: core/running does. Must not import slo, running or the scheduler. In reading order:

    queue.py         WaitingQueue: what the scheduler calls
    policies.py      the policies by name; add yours here
    sort_key.py      SortKey: the order of two requests
    keyed.py         KeyedQueue: policies that are a function from request to key
    fair.py          FairQueue: the tenant with the least service is next
    accounts.py      service given to each tenant
    aging.py         requests that have waited longer than max_wait_s
    attribution.py   seconds of each wait by cause
    request_heap.py  a heap with removal
"""
