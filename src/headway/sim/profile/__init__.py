"""Profiles: what steps and requests take on one machine with one model. In reading order:

machine.py    MachineProfile: measured step times, overhead and delays
plain.py      values of JSON as dataclasses
datasheet.py  profiles computed from the datasheets of GPUs
catalog.py    profiles by name
fitting.py    fits a profile to what an engine was observed to do; needs msgspec
shipped/      profiles that Headway ships
"""
