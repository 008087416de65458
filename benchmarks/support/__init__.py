"""Servers, databases and tiny models that scripts and tests start."""
