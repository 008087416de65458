"""The KV cache: which blocks each request holds, and what is evicted first.

Owns blocks, block tables and the prefix index. Decides nothing about who runs: it must not import
waiting, slo, running or the scheduler. In reading order:

    prefix.py           block hashes and the prefix index
    eviction.py         cached blocks without an owner, in eviction order
    pool.py             allocation and reference counts of blocks
    cache.py            KVCache: block tables, prefix matches, blocks per tenant
    offload_slots.py    slots of the second store
    offload_methods.py  how a preempted request gives up blocks
    offload.py          what preempted requests keep
"""
