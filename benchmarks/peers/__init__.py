"""Compares Headway with other CPU engines: `python -m benchmarks.peers --help`."""
