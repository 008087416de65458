"""The request body of /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from headway.server.schema.completions import Prompt, prompts_schema, read_prompts
from headway.server.schema.request import Fields, RequestLimits

MAX_INPUTS = 128


class EmbeddingRequest(Fields):
    """One input or several; each is text or token ids."""

    input: Annotated[Any, WithJsonSchema(prompts_schema(MAX_INPUTS))]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | None = None

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        self.inputs()

    def inputs(self) -> list[Prompt]:
        """Return the inputs as a list, whichever of the four forms they came in."""
        return read_prompts(self.input, "input", MAX_INPUTS)
