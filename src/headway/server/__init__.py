"""The HTTP server: OpenAI's API over an AsyncEngine.

Must not import build, cli or bench, nor any tensor library. In reading order:

    serve.py        runs the apps until a signal, then drains
    service_manager.py  tells systemd when the server is ready, stops and is alive
    listeners.py    binds the ports and checks the settings before loading
    descriptors.py  how many connections the limit of open files allows
    loading.py      loads the model in a thread while probes are answered
    app.py          the two ASGI applications and their routes
    access.py       hosts, keys and gateways: what every request is checked against
    context.py      what the handlers share
    admission.py    admission to the queue, before a body is read
    grammars.py     checks of grammars, before their requests are sent
    streams.py      resumable streams, kept for a while without a reader
    background.py   events of background responses, kept for readers to come
    live.py         requests that are being answered, by id
    prompt_log.py   the log of prompts, redacted, for those who ask for it

    http/     below the API: limits, hosts, authentication, errors, SSE
    schema/   request and response bodies
    api/      the endpoints
    batches/  files, and the batches of requests in them
"""

from headway.server.access import AccessControl
from headway.server.admission import AdmissionController
from headway.server.app import Apps, ServedModel, create_context, make_apps
from headway.server.http.limits import Timeouts
from headway.server.listeners import ListenSockets, listen
from headway.server.loading import Loading
from headway.server.serve import ServerParts, collect_rarely, run, serve

__all__ = [
    "AccessControl",
    "AdmissionController",
    "Apps",
    "ListenSockets",
    "Loading",
    "ServedModel",
    "ServerParts",
    "Timeouts",
    "collect_rarely",
    "create_context",
    "listen",
    "make_apps",
    "run",
    "serve",
]
