"""The ledger: one row per finished request, written even while the database is away.

In reading order:

    usage.py      a row and its cost
    connection.py a connection to an SQL database
    store.py      rows in an SQL database
    databases.py  SQLite and PostgreSQL, by URL
    spool.py      rows on disk until the database has them
    writer.py     the threads that write
    ledger.py     Ledger: finds and writes accounts
"""
