"""What is done with each client: `python -m benchmarks.clients.uses.with_openai URL MODEL KEY`.

Runs in the environment of the client, so nothing of Headway is imported. Each check prints a line
of JSON.

checks.py  how a module runs its checks and reports them
tools.py   questions, tools and a tokenizer that several clients use
with_*.py  one client each
"""
