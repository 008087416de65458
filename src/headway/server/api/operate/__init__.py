"""Endpoints for whoever runs the server.

health.py        health probes
status.py        metrics, version and load
explanations.py  why a request took as long as it did
requests.py      cancels a request
traces.py        recent steps and requests, for `headway trace`
"""
