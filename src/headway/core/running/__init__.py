"""The running set: admission, preemption and the choice of victims.

RunningSet is the only writer of a request's state. Decisions here are pure; RunningSet applies
them. Must not import the scheduler. In reading order:

    admission.py    does a request ever fit, and does it fit now: Admit, Wait, Refuse
    headroom.py     blocks left free for running requests to grow into
    victim.py       which running requests to preempt
    running_set.py  RunningSet: admits, preempts, forks and finishes requests
    preemption.py   blocks and places for those that need them, by preempting others
"""
