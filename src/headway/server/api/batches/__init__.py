"""Endpoints of batches and their files.

files.py    /v1/files
batches.py  /v1/batches
"""
