"""Supervision: starts the engine process, detects hangs, replaces it, finds the cause.

The supervisor knows processes, not requests. `suspects.py` alone imports client, for the streams.
In reading order:

    launcher.py        one engine process and its sockets
    restart_policy.py  when a process counts as hung, how often it may be replaced
    supervisor.py      Supervisor: serves, detects a failure, replaces the process
    suspects.py        which requests may have taken an engine down, and their trials
    quarantine.py      requests that took the engine down twice
"""
