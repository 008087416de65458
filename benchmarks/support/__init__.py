"""Servers, databases and tiny models that the scripts and the tests start."""
