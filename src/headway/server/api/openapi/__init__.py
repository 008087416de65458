"""The OpenAPI document of this server.

document.py  the document
route.py     /openapi.json
"""
