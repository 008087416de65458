"""Fields that ask for structured output, and the grammar that they mean."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from headway.errors import InvalidRequestError
from headway.server.schema.fields import Fields, Only
from headway.text.grammar import choice_grammar, json_grammar, lark_grammar, regex_grammar

_SCHEMA = {"type": "object", "additionalProperties": True}
_ANY_OBJECT = {"type": "object"}
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


class JsonSchemaFormat(Fields):
    """A named schema. It is always enforced, with `strict` or without."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    schema_: Annotated[Any, Field(alias="schema"), WithJsonSchema(_SCHEMA)] = None
    strict: bool | None = None


class ResponseFormat(Fields):
    """The field `response_format` of the OpenAI API."""

    type: Annotated[str, WithJsonSchema({"enum": ["text", "json_object", "json_schema"]})]
    json_schema: JsonSchemaFormat | None = None

    def grammar(self) -> str | None:
        """Return the grammar of the format; None for text."""
        if self.type == "json_schema":
            if self.json_schema is None or self.json_schema.schema_ is None:
                raise InvalidRequestError(
                    "response_format.json_schema needs a name and a schema",
                    "response_format.json_schema",
                )
            return json_grammar(self.json_schema.schema_)
        if self.json_schema is not None:
            raise InvalidRequestError(
                "response_format.json_schema is for the type json_schema",
                "response_format.json_schema",
            )
        if self.type == "json_object":
            return json_grammar(_ANY_OBJECT)
        if self.type == "text":
            return None
        raise InvalidRequestError(
            "response_format.type must be text, json_object or json_schema, "
            f"got {self.type[:40]!r}",
            "response_format.type",
        )


class StructuredOutputs(Fields):
    """The field `structured_outputs` of vLLM: exactly one kind of constraint."""

    json_: Annotated[
        Any, Field(alias="json"), WithJsonSchema({"anyOf": [_SCHEMA, {"type": "string"}]})
    ] = None
    regex: str | None = None
    choice: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "string"}})] = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None
    disable_additional_properties: Annotated[Any, Only((False,))] = None
    whitespace_pattern: Annotated[Any, Only()] = None
    structural_tag: Annotated[Any, Only()] = None

    def to_grammar(self) -> str:
        """Return the grammar of the one constraint."""
        values = (self.json_, self.regex, self.choice, self.grammar, self.json_object or None)
        given: dict[str, Any] = {
            name: value for name, value in zip(_KINDS, values, strict=True) if value is not None
        }
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs must have exactly one of {', '.join(_KINDS)}",
                "structured_outputs",
            )
        kind, value = next(iter(given.items()))
        is_compact = bool(self.disable_any_whitespace)
        try:
            if kind in ("json", "json_object"):
                schema = value if kind == "json" else _ANY_OBJECT
                return json_grammar(schema, is_compact=is_compact)
            if kind == "regex":
                return regex_grammar(value)
            return choice_grammar(value) if kind == "choice" else lark_grammar(value)
        except InvalidRequestError as error:
            error.param = f"structured_outputs.{kind}"
            raise
