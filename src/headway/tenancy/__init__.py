"""Tenants and tiers: who there is, on what terms each is served, and what it has used.

Must not know HTTP or the engine. In reading order:

    values.py     tenants, tiers, quotas and prices as plain values
    keys.py       keys and their digests
    document.py   YAML with line numbers
    roster.py     the tenants file, read and checked
    edit.py       the tenants file, changed by commands
    quotas.py     token buckets and leases of quota
    directory.py  Directory: tenants by key or name
    watch.py      reloads a changed file
    keys_file.py  single keys and the keys file
    load.py       all of it from the settings
"""

from headway.tenancy.directory import Directory, TenantRecord
from headway.tenancy.quotas import Meter, QuotaLease
from headway.tenancy.values import Price, Quotas, Roster, Tenant, Tier

__all__ = [
    "Directory",
    "Meter",
    "Price",
    "QuotaLease",
    "Quotas",
    "Roster",
    "Tenant",
    "TenantRecord",
    "Tier",
]
