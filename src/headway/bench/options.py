"""Options that several bench commands share; the command line makes flags from the fields."""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.core.params import SamplingParams
from headway.errors import ConfigError, InvalidRequestError

_SAMPLING = "Sampling"


def option_about(panel: str, about: str, flag: str | None = None) -> dict[str, str | None]:
    """Return the metadata of a field for the command line."""
    return {"panel": panel, "about": about, "flag": flag}


def flag_of(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class SamplingOptions:
    """How the requests of a benchmark sample; greedy by default."""

    temperature: float = field(
        default=0.0, metadata=option_about(_SAMPLING, "Temperature of all requests; 0 is greedy.")
    )
    top_p: float = field(
        default=1.0,
        metadata=option_about(_SAMPLING, "Sample from the likeliest tokens of this probability."),
    )
    top_k: int = field(
        default=0,
        metadata=option_about(_SAMPLING, "Sample from this many of the likeliest tokens; 0: all."),
    )

    def __post_init__(self) -> None:
        try:
            params = self.sampling_params()
        except InvalidRequestError as error:
            raise ConfigError(f"{flag_of(error.param or '')}: {error}") from error
        for name in ("top_p", "top_k"):
            if params.is_greedy and getattr(params, name) != getattr(SamplingParams(), name):
                raise ConfigError(f"{flag_of(name)} needs --temperature above 0")

    def sampling_params(self, max_tokens: int | None = None) -> SamplingParams:
        """Return the parameters of a request that ignores the end-of-sequence token."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=max_tokens,
            ignore_eos=True,
        )

    def sampling_fields(self) -> dict[str, float]:
        """Return the fields of a request; those that change nothing are left out."""
        fields: dict[str, float] = {"temperature": self.temperature}
        if self.top_p < 1:
            fields["top_p"] = self.top_p
        if self.top_k > 0:
            fields["top_k"] = self.top_k
        return fields

    def sampling_text(self) -> str:
        if self.sampling_params().is_greedy:
            return "greedy"
        return ", ".join(f"{name} {value:g}" for name, value in self.sampling_fields().items())


GREEDY = SamplingOptions()
