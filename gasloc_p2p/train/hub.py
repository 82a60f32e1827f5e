"""Causal language models by name, in the form of transformers, from a folder on this disk."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from blake3 import blake3
from safetensors import SafetensorError
from torch import nn

from gasloc_p2p.core.errors import ConfigError
from gasloc_p2p.train.initial import initialise
from gasloc_p2p.train.model import require_model_folder
from gasloc_p2p.train.parameters import ParameterView, theta_digest
from gasloc_p2p.train.settings import ModelConfig

DEFAULT_LENGTH: Final = 1024
"""Tokens of a window where nothing else is said and the model takes so many."""
MOST_BYTES: Final = 384
"""A model that was trained on bytes knows no more tokens than 256 and some marks."""
USUAL_DEVIATION: Final = 0.02
"""Of initial matrices, for architectures that name none."""
_PROBE_TOKENS: Final = 8

_NO_PART_OF_THE_MODEL: Final = frozenset(
    {"transformers_version", "_name_or_path", "_commit_hash", "torch_dtype", "dtype", "use_cache"}
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NamedModel:
    """A model that is known by its configuration, before any of its parameters is read.

    Attributes:
        model: the settings that name it.
        source: the folder of its files.
        described: what its config.json says.
        config: the same as transformers' own object.
    """

    model: ModelConfig
    source: str
    described: Mapping[str, Any]
    config: Any

    @classmethod
    def open(cls, model: ModelConfig, *, folder: str) -> NamedModel:
        """Read the configuration of a model.

        Args:
            model: the settings that name it.
            folder: where its files lie; see `gasloc_p2p.data.models` for those of a hub.

        Raises:
            ConfigError: it cannot be read, is no causal language model, or needs code of its own.
        """
        from transformers import PretrainedConfig
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
        from transformers.utils import logging as transformers_logging

        logging.getLogger("transformers").setLevel(logging.ERROR)
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # theirs
        require_model_folder(folder)
        source = str(Path(folder).expanduser())
        try:
            described, _ = PretrainedConfig.get_config_dict(source, local_files_only=True)
        except (OSError, ValueError) as error:
            raise _unreadable(source, error) from error
        described = {k: v for k, v in described.items() if k not in _NO_PART_OF_THE_MODEL}
        kind = str(described.get("model_type"))
        if kind not in CONFIG_MAPPING:
            raise _unknown_kind(model, kind, has_code="auto_map" in described)
        config = CONFIG_MAPPING[kind].from_dict(dict(described))
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise _not_causal(model)
        _make_deterministic(config)
        return cls(model=model, source=source, described=described, config=config)

    @property
    def sequence_length(self) -> int:
        """Tokens of one window.

        Raises:
            ConfigError: the model does not take as many as are set.
        """
        most = getattr(self.config.get_text_config(), "max_position_embeddings", None) or 0
        wanted = self.model.sequence_length
        if wanted and most and wanted > most:
            raise ConfigError(
                f"model.sequence_length = {wanted} is too long for {self.model.name}",
                why=f"it was made for at most {most} tokens",
                fix=f"set model.sequence_length to {most} or less",
            )
        return wanted or min(DEFAULT_LENGTH, most or DEFAULT_LENGTH)

    def require_tokens(self, vocabulary: int) -> None:
        """Refuse a tokenizer with more tokens than existing weights are for.

        Raises:
            ConfigError: it has.
        """
        has = self.config.get_text_config().vocab_size
        if self.model.weights == "existing" and vocabulary > has:
            raise ConfigError(
                f"the tokenizer has {vocabulary} tokens, and {self.model.name} {has}",
                why="existing weights go with the tokenizer that they were trained with",
                fix="set model.tokenizer to that of the model, or model.weights=fresh",
            )
        if (
            self.model.weights == "existing"
            and self.model.tokenizer == "bytes"
            and has > MOST_BYTES
        ):
            raise ConfigError(
                f"the tokens of this run are bytes, and {self.model.name} knows {has} tokens",
                why="existing weights go with the tokenizer that they were trained with, and to "
                "them bytes are other tokens",
                fix=f"set model.tokenizer={self.model.name}, or `file` with data.tokenizer_file, "
                "or model.weights=fresh",
            )

    def build(self, *, seed: int, vocabulary: int) -> nn.Module:
        """Return the model, fp32 on the CPU.

        With fresh weights it is the architecture with `vocabulary` tokens and initial parameters
        that follow from `seed`; with existing ones it is what the files hold.

        Raises:
            ConfigError: its weights cannot be read, do not fit, or are not in safetensors files;
                it has fewer tokens than the tokenizer; it looks ahead.
        """
        existing = self.model.weights == "existing"
        module = self._loaded(vocabulary) if existing else self._fresh(seed, vocabulary)
        if _looks_ahead(module, vocabulary):
            raise _not_causal(self.model)
        return module

    def digest(self, module: nn.Module | None) -> str:
        """Return, in hex, a digest of the architecture, and of existing weights.

        Args:
            module: what `build` returned; fresh weights do without.
        """
        hasher = blake3(json.dumps(self.described, sort_keys=True, default=str).encode())
        if self.model.weights == "existing":
            assert module is not None
            hasher.update(theta_digest(ParameterView(module).read()).encode())
        return hasher.hexdigest()

    def require_digest(self, expected: str, module: nn.Module) -> None:
        """Refuse a model that is not the one with which the run was founded.

        Raises:
            ConfigError: its digest differs; an empty `expected` is that of no run.
        """
        if expected and self.digest(module) != expected:
            raise ConfigError(
                f"what is here as {self.model.name} is not the model of the run",
                why="its configuration or its weights differ from those that the founder has; a "
                "branch of the hub may have moved on since",
                fix="ask the founder for the commit or a copy of the folder; whoever founds a run "
                "had better set model.revision to a commit",
            )

    def _fresh(self, seed: int, vocabulary: int) -> nn.Module:
        from transformers import AutoModelForCausalLM

        text = self.config.get_text_config()
        text.vocab_size = vocabulary
        with torch.random.fork_rng(devices=[]):
            make: Any = AutoModelForCausalLM
            module: nn.Module = make.from_config(
                self.config, dtype=torch.float32, trust_remote_code=False
            )
        deviation = getattr(text, "initializer_range", None) or USUAL_DEVIATION
        initialise(module, seed, deviation=deviation)
        return module

    def _loaded(self, vocabulary: int) -> nn.Module:
        from transformers import AutoModelForCausalLM

        self.require_tokens(vocabulary)
        try:
            make: Any = AutoModelForCausalLM
            module: nn.Module
            with torch.random.fork_rng(devices=[]):
                module, found = make.from_pretrained(
                    self.source,
                    config=self.config,
                    dtype=torch.float32,
                    local_files_only=True,
                    use_safetensors=True,
                    trust_remote_code=False,
                    output_loading_info=True,
                )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise _unreadable(self.source, error) from error
        left_out = sorted(found["missing_keys"])
        if left_out:
            raise ConfigError(
                f"{self.source} does not hold all weights of a causal language model",
                why=f"there is none for {left_out[0]}, which would begin at random",
                fix="name a model that was saved with its head, or set model.weights=fresh",
            )
        return module


def _make_deterministic(config: Any) -> None:
    """Leave out what draws random numbers, and special tokens, which training does not use."""
    text = config.get_text_config()
    for name, value in text.to_dict().items():
        if isinstance(value, float) and ("dropout" in name or name.endswith(("pdrop", "_drop"))):
            setattr(text, name, 0.0)
    for each in (config, text):
        each.pad_token_id = each.bos_token_id = each.eos_token_id = None
        each.use_cache = False


@torch.no_grad()
def _looks_ahead(module: nn.Module, vocabulary: int) -> bool:
    """Whether what a model says of early tokens depends on later ones."""
    tokens = torch.arange(_PROBE_TOKENS)[None] % vocabulary
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % vocabulary
    module.eval()
    said, other = (module(input_ids=ids).logits[:, :-1] for ids in (tokens, changed))
    module.train()
    return not torch.allclose(said, other, rtol=1e-4, atol=1e-5)


def _unreadable(source: str, error: Exception) -> ConfigError:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ConfigError(
        f"the model in {source} cannot be read",
        why=first,
        fix="see whether all of its files are there and whole, as save_pretrained of transformers "
        "writes them, or name another device.model_folder; a copy from the hub is fetched anew "
        "once that folder is removed",
    )


def _unknown_kind(model: ModelConfig, kind: str, *, has_code: bool) -> ConfigError:
    if has_code:
        return ConfigError(
            f"{model.name} needs code of its own",
            why="its files name Python code to run, which no run makes its peers do",
            fix="choose a model whose architecture is part of transformers",
        )
    return ConfigError(
        f"transformers does not know the architecture {kind!r} of {model.name}",
        why="this version of transformers is older than the model, or it is no language model",
        fix="pip install --upgrade transformers, or choose another model",
    )


def _not_causal(model: ModelConfig) -> ConfigError:
    return ConfigError(
        f"{model.name} is no causal language model",
        why="only models that predict each token from those before it can be trained here",
        fix="choose one that is listed under text generation, such as Qwen/Qwen2.5-0.5B",
    )
