"""The KV cache: block tables, the prefix cache and the offload of preempted requests.

Owns blocks, slots, block tables and the prefix index. Does not choose which requests run: it must
not import waiting, slo, running or the scheduler. In reading order:

    prefix.py           block hashes and the prefix index
    eviction.py         cached blocks without an owner, in eviction order
    pool.py             allocation and reference counts of blocks
    cache.py            KVCache: block tables, prefix matches, blocks per tenant
    offload_slots.py    slots of the offload store
    offload_methods.py  the cheapest method to free blocks of a preempted request
    offload.py          blocks and slots that preempted requests keep
"""
