"""Tool calls: how families of models write them, as grammars and as parsers.

Knows neither HTTP nor the engine. In reading order:

    forms.py     one description per family of models
    grammar.py   the grammar of a reply that may call tools
    parser.py    finds calls in a reply that arrives in pieces
    xml.py       arguments in tags: their grammar and their reader
    deltas.py    what a reply gained
    prompts.py   conversations in the form that a template reads
    dialect.py   how one model writes conversations, found from its template
"""
