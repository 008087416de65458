"""Supervision: starts the engine process, detects hangs, replaces it.

Knows processes and messages, not streams. In reading order:

    start.py           starts a process; memory that outlives it
    launcher.py        one engine process and its sockets
    restart_policy.py  when a process counts as hung, how often it may be replaced
    loss.py            what a lost process leaves as evidence
    supervisor.py      Supervisor: serves, detects a failure, replaces the process
    quarantine.py      requests that took the engine down twice
"""
