"""What every HTTP request passes, whatever its endpoint.

Must not import api, schema or the engine. In reading order:

    limits.py        bounds on headers, bodies and slow readers
    edge.py          request ids, and the answer to the unexpected
    hosts.py         accepted Host headers
    proxies.py       trusted gateway headers
    auth.py          authentication: which tenant a key belongs to
    rate_headers.py  x-ratelimit headers
    encoding.py      JSON responses
    errors.py        exceptions to OpenAI's error bodies
    disconnect.py    ends work whose client has left
    sse.py           server-sent events
"""
