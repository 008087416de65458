"""The ledger: one row per finished request, written even if the database is away.

In reading order:

    usage.py      a row, and what it costs
    store.py      rows in an SQL database
    databases.py  SQLite and PostgreSQL, by URL
    spool.py      rows on disk until the database has them
    writer.py     the writing thread
    ledger.py     Ledger
"""
