"""Tenants and tiers: keys, terms, and use of quotas.

Must not know HTTP or the engine. In reading order:

    values.py     tenants, tiers, quotas and prices as plain values
    keys.py       API keys and their digests
    document.py   YAML with line numbers
    roster.py     reads and checks the tenants file
    edit.py       changes the tenants file, for `headway tenants`
    keys_file.py  reads and extends the keys file
    quotas.py     token buckets, meters and quota leases
    shared_quotas.py  the port to quotas over several frontends
    directory.py  Directory: tenant records by key or name
    watch.py      reloads a changed tenants file or keys file
    load.py       builds directory and watcher from the settings
"""

from headway.tenancy.directory import Directory, TenantRecord
from headway.tenancy.quotas import Meter, QuotaLease
from headway.tenancy.shared_quotas import SharedMeters
from headway.tenancy.values import Price, Quotas, Roster, Tenant, Tier

__all__ = [
    "Directory",
    "Meter",
    "Price",
    "QuotaLease",
    "Quotas",
    "Roster",
    "SharedMeters",
    "Tenant",
    "TenantRecord",
    "Tier",
]
