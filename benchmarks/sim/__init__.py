"""The scheduler on a virtual clock, and the CPU time of its own code."""
