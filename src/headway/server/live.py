"""The requests of this process that are being answered, by id."""

from __future__ import annotations

from weakref import WeakValueDictionary

from headway.server.api.generate.generation import Generation, GenerationSpec


class LiveGenerations:
    """Finds a tenant's request by its id or by the client's own id; keeps none alive."""

    def __init__(self) -> None:
        self._by_id: WeakValueDictionary[tuple[str, str], Generation] = WeakValueDictionary()

    def add(self, generation: Generation, spec: GenerationSpec, client_id: str) -> None:
        for name in (spec.id, client_id):
            if name:
                self._by_id[spec.terms.tenant, name] = generation

    def find(self, tenant: str, name: str) -> Generation | None:
        return self._by_id.get((tenant, name))
