"""What a hub refuses, in words: what happened, why, and what to do."""

from __future__ import annotations

from huggingface_hub import get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # exported, without `as`
    validate_repo_id,
)

from gasloc_p2p.core.errors import DataError


def require_name(name: str, *, kind: str) -> None:
    """Refuse what cannot be the name of a repository.

    Args:
        name: as in OWNER/NAME.
        kind: "dataset" or "model".

    Raises:
        DataError: it is none.
    """
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        example = (
            "model.name=Qwen/Qwen2.5-0.5B"
            if kind == "model"
            else "data.path=hub:HuggingFaceFW/fineweb"
        )
        raise DataError(
            f"{name!r} is no name of a {_words(kind)}.",
            why=str(error),
            fix=f"Names look like OWNER/NAME: --set {example}",
        ) from error


def refusal(name: str, kind: str, error: Exception, status: int, *, listing: bool) -> DataError:
    """Return what to say of a request that waiting does not mend.

    Args:
        name: of the repository.
        kind: "dataset" or "model".
        error: what the library made of the answer.
        status: of the answer.
        listing: whether the repository itself was asked for, not one of its files.
    """
    page = "datasets/" if kind == "dataset" else ""
    if isinstance(error, GatedRepoError):
        return DataError(
            f"{name} is gated: its owner wants to know who uses it.",
            why="The hub does not hand it out to this machine yet.",
            fix=f"Accept its terms at https://huggingface.co/{page}{name}, then run "
            "`hf auth login` or set HF_TOKEN.",
        )
    if isinstance(error, RevisionNotFoundError):
        return DataError(
            f"{name} has no such revision.",
            why=f"The hub answered {status}.",
            fix=f"Correct {'model' if kind == 'model' else 'data'}.revision, or leave it out.",
        )
    if get_token() is not None and (status == 403 or _is_of_the_token(error, status)):
        return DataError(
            f"The hub does not hand out {name} with this machine's token.",
            why=f"It answered {status}: the token that `hf auth login` or HF_TOKEN set is "
            + ("not one that it knows." if status == 401 else "not allowed to read this."),
            fix="Run `hf auth login` again, or set HF_TOKEN to a token that may read it.",
        )
    absent = isinstance(error, RepositoryNotFoundError) or (listing and status == 404)
    if absent or status in (401, 403):
        return DataError(
            f"There is no {_words(kind)} {name} on the hub, or it is private.",
            why=f"The hub answered {status}; it does not say which of the two.",
            fix="Look for a slip in the name (OWNER/NAME); for a private one run "
            "`hf auth login` or set HF_TOKEN.",
        )
    return DataError(
        f"The hub does not hand out a file of {name}.",
        why=f"It answered {status}: {str(error).splitlines()[0]}",
        fix="See whether the file is still there, or name another revision.",
    )


def _words(kind: str) -> str:
    return "data set" if kind == "dataset" else kind


def _is_of_the_token(error: Exception, status: int) -> bool:
    """Whether the hub refused a token, rather than the repository to whoever has none."""
    return status == 401 and not isinstance(error, RepositoryNotFoundError)
