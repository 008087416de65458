"""What every HTTP request passes, whatever its endpoint.

Must not import api, schema or the engine. In reading order:

    limits.py        bounds on connections, headers, bodies and slow readers
    access_log.py    the log of answered requests
    edge.py          request ids, and the answer to unexpected exceptions
    hosts.py         accepted Host headers
    proxies.py       trusted gateway headers
    auth.py          authentication: the tenant of a key
    rate_headers.py  x-ratelimit headers
    query.py         parameters of URLs
    routing.py       collects the routes of one file
    encoding.py      JSON responses
    errors.py        from exceptions to OpenAI's error bodies
    disconnect.py    cancels work whose client has left
    sse.py           server-sent events
    multipart.py     forms with files, in pieces
    file_stream.py   answers in pieces: files, and what is made meanwhile
    trace_headers.py traceparent of requests and answers
"""
