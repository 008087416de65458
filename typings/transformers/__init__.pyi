# The oracle of tests and one of the peers. Its own types take pyright forty seconds.
from typing import Any

def __getattr__(name: str) -> Any: ...
