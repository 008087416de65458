"""The frontend's side of its connections to engines, and how it finds them.

Must not decide which engine a request goes to: that is routing. In reading order:

    link.py             NetworkLink: connects, connects again, and reports what happens
    discovery.py        which engines there are
    fleet_discovery.py  the same, from the manager of a fleet
"""
