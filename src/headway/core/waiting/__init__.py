"""The waiting queue: who is admitted next, and why the others wait.

Owns the order of waiting requests, service counters per tenant, aging, KV quotas of waiting tenants
and wait attribution. Must not import slo, running or the scheduler. In reading order:

    queue.py          the policy port, sort keys, a heap
    policies.py       policies by name
    accounts.py       service per tenant, in weighted tokens
    fair.py           the fair policy: least service for its weight goes first
    aging.py          requests that waited too long
    attribution.py    the cause of every waiting second
"""
