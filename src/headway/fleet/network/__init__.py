"""What all processes of a fleet share: messages, keys and connections.

Must not know who uses a connection. In reading order:

    wire.py           the messages between frontends and engines, and their bounds
    cluster_key.py    the key of a cluster, and the encryption that follows from it
    endpoints.py      addresses, and who may use them without a key
    clocks.py         times of another machine, as times of this one
    live.py           requests of one connection: their attempts, and the credit
    checks.py         checks what one side says before the other relies on it
    server_socket.py  the socket on which engines, routers and managers wait
    connection.py     one connection to an engine or a router
"""
