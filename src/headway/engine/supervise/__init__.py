"""Supervision: starts the engine process, detects hangs, replaces it, quarantines requests.

Knows processes, not requests; must not import client. In reading order:

    launcher.py        one engine process and its sockets
    restart_policy.py  when a process counts as hung, how often it may be replaced
    quarantine.py      requests that took the engine down twice
    supervisor.py      Supervisor
"""
