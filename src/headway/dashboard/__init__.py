"""The dashboard on the admin listener, and the playground on the public listener.

Shows what observe knows; owns ten minutes of history in memory, and nothing else. Must not be
imported by server or fleet. In reading order:

    waits.py      waiting time by cause over the last ten minutes
    history.py    counts of the last ten minutes, in intervals of five seconds
    tenants.py    counts of the last ten minutes for the busiest tenants
    collector.py  an observer that fills all three
    frames.py     what the stream sends: the state now, and the history in columns
    stream.py     the stream: two frames a second, for few viewers
    settings.py   the settings, and which differ from their defaults
    data.py       JSON routes: tenants, requests, engines, settings
    actions.py    abort a request, drain, change the log level
    files.py      the static files, with their security headers
    pages.py      all routes together

    static/       ES modules, style sheets and vendored libraries; no build step
"""

from headway.dashboard.collector import Collector
from headway.dashboard.pages import make_pages

__all__ = ["Collector", "make_pages"]
