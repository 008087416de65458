"""A load client of any OpenAI-compatible server.

Must not import offline. In reading order:

    http.py     an HTTP/1.1 client that keeps times
    openai.py   one streamed request
    records.py  what a request recorded
    runner.py   open and closed loops
    stats.py    percentiles, goodput
    sweep.py    rates up to the knee
    measure.py  warm-up, run, sweep
    options.py  the command's options
    text.py     tables
    plot.py     plots
    report.py   JSON, CSV, console
"""
