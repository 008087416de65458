"""The running set: admission, preemption and the choice of victims.

RunningSet is the only writer of request state. The decisions in admission.py and victim.py are
pure; RunningSet applies them. Must not import the scheduler. In reading order:

    admission.py    whether a request can ever fit, and whether it fits now: Admit, Wait, Refuse
    headroom.py     blocks left free for running requests to grow into
    victim.py       which running requests to preempt
    running_set.py  RunningSet: admits, preempts, forks and finishes requests
    preemption.py   frees blocks and sequences for requests that need them
"""
