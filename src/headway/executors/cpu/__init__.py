"""Compiled CPU kernels: bindings, and the model that runs on them.

The build puts the library of kernels/ into this folder. In reading order:

    kernels.py        ctypes bindings
    sampling.py       sampling settings in the structs of the kernels
    offload_store.py  KV blocks of preempted requests
    packed_cache.py   files of packed weights
    packing.py        Packer: packs weights, or reads them from the cache
    large_pages.py    shared memory on large pages
    shared_kv.py      KV blocks that outlive the process
    compiled.py       CompiledModel: runs steps
"""
