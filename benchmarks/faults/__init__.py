"""Servers under bad inputs, disconnects, engine failures and database outages."""
