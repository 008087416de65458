"""Finds the files of a model: a GGUF file, a folder or a Hugging Face repository.

Without tensors: the API process needs the files for the tokenizer and never loads torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from headway.errors import ModelLoadError

DOWNLOADED = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.txt")


class SourceKind(StrEnum):
    """Format of a checkpoint."""

    GGUF = "gguf"
    FOLDER = "folder"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Location of a checkpoint on this machine."""

    kind: SourceKind
    path: Path


def locate(model: str, revision: str | None = None) -> ModelSource:
    """Return the files of a model; downloads a Hugging Face repository unless cached."""
    return locate_here(model) or ModelSource(SourceKind.FOLDER, _download(model, revision))


def locate_here(model: str) -> ModelSource | None:
    """Return the files of a model given by its path; None for a Hugging Face id."""
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelLoadError(f"{path} is not a .gguf file; give a GGUF file or a folder")
        return ModelSource(SourceKind.GGUF, path)
    if path.is_dir():
        return ModelSource(SourceKind.FOLDER, path)
    if path.suffix == ".gguf" or path.is_absolute() or model.startswith((".", "~")):
        raise ModelLoadError(f"no such file or folder: {path}")
    return None


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(DOWNLOADED)))
    except HFValidationError as error:
        raise ModelLoadError(
            f"{model!r} is neither a file, a folder, nor a Hugging Face id (owner/name)"
        ) from error
    except GatedRepoError as error:
        raise ModelLoadError(
            f"{model} is gated: accept its terms on huggingface.co, then set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(f"{model} has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"no file, folder or Hugging Face repository named {model}; "
            "check the spelling, or set HF_TOKEN if it is private"
        ) from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise ModelLoadError(
            f"{model} is not in the local Hugging Face cache and cannot be downloaded: connect "
            "to the network (and unset HF_HUB_OFFLINE), or give the path of a GGUF file or folder"
        ) from error
