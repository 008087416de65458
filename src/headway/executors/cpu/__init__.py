"""Compiled CPU kernels: bindings, and the model that runs on them.

The build puts the library of kernels/ into this folder. In reading order:

    kernels.py   ctypes bindings
    compiled.py  CompiledModel: packs weights and runs steps
"""
