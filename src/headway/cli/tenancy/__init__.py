"""Who may use a server: `headway tenants` and `headway keys`.

In reading order:

    tenants.py  tenants, their keys and quotas
    keys.py     keys of tenants, and the key of a fleet
"""
