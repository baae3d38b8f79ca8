"""What blocks that engines read from each other have in common, beside their tokens."""

import hashlib
import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig

from xquant.identity import of_configuration
from xquant.serve import fit

from .checks import model_of

_FORMAT = 4
"""Blocks of another format have other names."""


def of_engine(config: VllmConfig, options: fit.ConnectorOptions) -> bytes:
    """The model as this engine computes it, how blocks are stored, and what states were read through.

    Raises:
        ValueError: the model's weights are not at hand.
    """
    model, own = model_of(config), config.model_config
    computed = [of_configuration(own.hf_config), str(model.dtype), own.disable_sliding_window]
    packed = [own.quantization, own.quantization_config, getattr(own.hf_config, "quantization_config", None)]
    if config.load_config.load_format == "dummy":
        computed.append(own.seed)  # of which vLLM makes its weights
    parts = [_FORMAT, model.identity, *computed, *packed, model.shards, *options.identity(model)]
    return json.dumps(parts, sort_keys=True, default=str).encode()


class Adapters:
    """Digests of the files of LoRA adapters: vLLM knows these by name and path alone."""

    def __init__(self) -> None:
        self._known: dict[Hashable, bytes | None] = {}

    def digest(self, asked: Any) -> bytes | None:
        """Of the adapter of a request, as it was when it was first asked for, since vLLM loads it then; empty
        without an adapter. None: its files are not at hand."""
        if asked is None:
            return b""
        key = asked.lora_int_id, asked.lora_path
        if asked.load_inplace:  # what is in the folder now takes the place of what was loaded
            key += tuple((each, each.stat().st_mtime_ns) for each in _files(asked.lora_path))
        if key not in self._known:
            self._known[key] = _digest(_files(asked.lora_path))
        return self._known[key]


def _files(folder: str) -> list[Path]:
    return sorted(each for each in Path(folder).glob("*") if each.is_file())


def _digest(files: list[Path]) -> bytes | None:
    if not files:
        return None
    whole = hashlib.sha256()
    for each in files:
        with each.open("rb") as opened:
            whole.update(f"{each.name} {hashlib.file_digest(opened, 'sha256').hexdigest()}\n".encode())
    return whole.digest()
