"""A load client of any OpenAI-compatible server.

Must not import offline. In reading order:

    http.py     a small HTTP/1.1 client
    records.py  record of one request
    openai.py   one streamed request
    runner.py   open and closed loops
    stats.py    percentiles, goodput
    sweep.py    rates up to the knee
    measure.py  warm-up, run, sweep
    workload.py  options of a workload
    options.py  options of the command
    text.py     tables
    plot.py     plots
    report.py   JSON, CSV, console
    own_server.py  a server of this installation, to be measured
"""
