"""Tenants and tiers: who there is, on what terms each is served, and what it has used."""

from headway.tenancy.directory import Directory, Standing
from headway.tenancy.quotas import Meter, Visit
from headway.tenancy.values import Price, Quotas, Roster, Tenant, Tier

__all__ = ["Directory", "Meter", "Price", "Quotas", "Roster", "Standing", "Tenant", "Tier", "Visit"]
