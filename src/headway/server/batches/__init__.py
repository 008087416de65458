"""Files and batches: many requests from one file, run on capacity that nobody else uses.

Must not import app or serve. In reading order:

    records.py   files and batches as values
    folder.py    the files on disk
    database.py  the records in a database
    store.py     BatchStore: the owner of files and batches
    lines.py     lines of an input file, and their checks
    results.py   the output files of a batch, written as results come
    job.py       one batch that runs
    feeder.py    BatchFeeder: runs the requests of all batches, fairly
"""
