"""The ruler that puts Headway beside its CPU peers: `python -m benchmarks.peers --help`."""
