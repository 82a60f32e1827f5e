"""A checkpoint's model in the form of transformers, for whatever reads that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn

from gasloc_p2p.core.errors import CheckpointError
from gasloc_p2p.train.parameters import ParameterView


def export_model(module: nn.Module, theta: Tensor, schema_digest: bytes, folder: Path) -> None:
    """Write config.json and safetensors files of a model with these parameters.

    Args:
        module: a model of transformers, of the architecture that the run trains.
        theta: parameters, fp32 [P].
        schema_digest: what `theta` holds; `LocalModel.schema_digest`.
        folder: made if it is not there.

    Raises:
        CheckpointError: the parameters are those of another architecture, or the disk is full.
    """
    from transformers.utils.logging import disable_progress_bar

    view = ParameterView(module)
    if view.schema.digest != schema_digest:
        raise CheckpointError(
            "the checkpoint does not fit the model of its run",
            why="it holds tensors of other names or shapes, so that model was another one then",
            fix="export with the versions of gasloc-p2p and transformers that trained it",
        )
    view.write(theta)
    saved: Any = module
    disable_progress_bar()  # type: ignore[no-untyped-call]  # theirs
    try:
        saved.save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the model cannot be written to {folder}",
            why=str(error),
            fix="make room there, or name another folder",
        ) from error


def export_tokenizer(tokenizer_json: str, end_of_text: str, folder: Path) -> None:
    """Write the files from which transformers reads a tokenizer.

    Args:
        tokenizer_json: the tokenizer in the format of the `tokenizers` library.
        end_of_text: the token between documents.
        folder: made if it is not there.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    make: Any = PreTrainedTokenizerFast
    pieced = Tokenizer.from_str(tokenizer_json)
    make(tokenizer_object=pieced, eos_token=end_of_text).save_pretrained(folder)
