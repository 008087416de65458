"""All routes of the dashboard and of the playground."""

from __future__ import annotations

from collections.abc import Callable

from headway.clock import SystemClock
from headway.config import Config
from headway.dashboard.actions import action_routes
from headway.dashboard.collector import Collector
from headway.dashboard.data import DashboardData
from headway.dashboard.files import dashboard_files, playground_files
from headway.dashboard.frames import FrameMaker
from headway.dashboard.stream import DashboardStream
from headway.observe import Observers
from headway.server.context import ServerContext
from headway.server.http.hosts import is_loopback
from headway.server.http.routing import Pages, Routes
from headway.tenancy import Directory


def make_pages(
    context: ServerContext, observers: Observers, config: Config, directory: Directory
) -> Pages:
    """Return the pages that the settings ask for; collect data if there is a dashboard."""
    public_files = playground_files() if config.server.playground else Routes()
    if not config.server.dashboard or config.server.admin_port is None:
        return Pages(public_files)
    collector = Collector(context.engine, observers, SystemClock())
    frames = FrameMaker(collector, context.status)
    stream = DashboardStream(frames, collector.clock, _is_over(context))
    data = DashboardData(context, config, directory, collector)
    actions = action_routes(context, directory, is_loopback(config.server.admin_host))
    routes = Routes([*data.routes(stream), *actions])
    return Pages(public_files, dashboard_files(), routes)


def _is_over(context: ServerContext) -> Callable[[], bool]:
    """Return whether the server stops and has drained; a stream would delay its end."""
    return lambda: context.admission.is_closed and not context.engine.num_requests
