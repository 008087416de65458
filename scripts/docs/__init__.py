"""What makes and checks the documentation.

In reading order:

    pages.py      the navigation; titles, anchors and links of a page
    blocks.py     code blocks, and which of them are not run
    reference.py  pages made of the code: settings, commands, metrics, causes
    fields.py     the page of the API's fields
    generate.py   writes what is made; `--check` fails where a file is out of date
    run.py        runs code blocks (scripts/test-docs)
"""
