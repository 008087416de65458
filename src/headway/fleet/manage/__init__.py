"""The manager of a fleet and its hosts: which engines and frontends there should be, and are.

Owns the desired state of a fleet and the processes of its members. Knows no Ray: a placer starts
hosts, on this machine or by headway.fleet.ray, and everything else goes over ZeroMQ. Tokens never
pass here. In reading order:

    spec.py        fleet.yaml: pools, their engines and frontends
    messages.py    what hosts and frontends exchange with the manager
    folders.py     the files of a fleet on one machine
    processes.py   processes without a parent, by their pid files
    daemon.py      the program between a host and a process without a parent
    members.py     FleetState: which members there should be, and who runs them; no input or output
    host.py        Host: starts, adopts, watches and stops the process of one member
    host_main.py   the program of a host on this machine
    placers.py     who starts hosts
    manager.py     Manager: sockets and clock around a FleetState
    control.py     the commands of `headway fleet`
"""
