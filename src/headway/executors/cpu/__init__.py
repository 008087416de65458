"""The compiled CPU kernels: bindings, and the model that runs on them.

The library is built from kernels/ into this folder. In reading order:

    kernels.py   ctypes bindings
    compiled.py  CompiledModel: packs weights, runs steps
"""
