"""Figures, plans and reports of a load on simulated engines. In reading order:

setup.py     what is simulated: engines, frontends, tenants, failures
settings.py  settings of a simulation as text
served.py    what a load was served
pool.py      engines that start, drain and are killed; the autoscaler
serving.py   a load on simulated engines, as clients see it
figures.py   figures over several runs, with intervals
verdict.py   what engines can do at most, and how near to it a load is
planning.py  how much load engines carry, how many a load needs
tables.py    figures as rows
page.py      parts of an HTML report
"""
