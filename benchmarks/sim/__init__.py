"""The scheduler on a virtual clock, and what its own code costs."""
