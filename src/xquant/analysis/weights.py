"""The bytes of a model's weights, in full or as a quantization stores them.

A quantization packs the matrices of linear layers and of experts. Each block of a matrix has a scale, and
perhaps a zero point. Embeddings, norms, biases, routers and the output layer stay as they are, and so does
what the quantization leaves out by name. ``quantization_config`` is read as transformers reads it, or as the
libraries do to which it hands the configuration.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import ceil, prod
from typing import Any

from torch import nn

LINEAR, EXPERTS = "Linear", "experts"
"""What quantizations call the layers that they pack: all linear ones and experts, or experts alone."""
WHOLE = 0
"""The side of a block that is as long as its matrix."""


@dataclass(frozen=True)
class Packing:
    """How a matrix is stored: the bits of a weight, how many rows and columns share a scale, and the bits of
    that scale and its zero point."""

    bits: float
    rows: int
    columns: int
    scale_bits: float

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a matrix, or of as many as there are experts."""
        *experts, rows, columns = shape
        blocks = prod(experts) * ceil(rows / (self.rows or rows)) * ceil(columns / (self.columns or columns))
        return ceil((prod(shape) * self.bits + blocks * self.scale_bits) / 8)

    def __str__(self) -> str:
        together = ""
        if self.columns:
            side = self.columns
            together = f" in groups of {side}" if self.rows == 1 else f" in blocks of {self.rows} x {side}"
        return f"{self.bits:g} bits{together}"


@dataclass(frozen=True)
class Quantization:
    """A quantization of weights: its name, the packing of the layers that a pattern names, of which the first
    that fits counts, and the patterns of what it leaves out."""

    name: str
    packings: Mapping[str, Packing]
    left_out: tuple[str, ...] = ()

    def packing_of(self, layer: str) -> Packing | None:
        """Of a linear layer or an expert's; None where its weights stay as they are."""
        if any(_names(pattern, layer) for pattern in self.left_out):
            return None
        return next((packing for at, packing in self.packings.items() if _names(at, layer)), None)

    def __str__(self) -> str:
        return f"{self.name} {' and '.join(dict.fromkeys(map(str, self.packings.values())))}".lstrip()


def _names(pattern: str, layer: str) -> bool:
    """Whether a pattern names a layer: all of them, a part of its path (with ``*`` for whatever), or ``re:``
    and a regular expression."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], layer) is not None
    return pattern == LINEAR or fnmatchcase(f".{layer}.", f"*.{pattern}.*")


def quantization_of(config: Any, bits: float | None = None) -> Quantization | None:
    """The quantization that a configuration names; with ``bits``, one of so many in its place.

    Raises:
        ValueError: one whose bytes are not known.
    """
    if bits is not None:
        return None if bits == 16 else Quantization("", {LINEAR: Packing(bits, 1, 128, 16)})
    named = getattr(config, "quantization_config", None)
    if not named:
        return None
    given = named if isinstance(named, Mapping) else named.to_dict()
    method = str(given.get("quant_method") or "bitsandbytes")  # the one that may leave out its name
    if method not in READERS:
        raise ValueError(_unknown(method))
    name, read = READERS[method]
    left_out = [given.get(key) or () for key in ("modules_to_not_convert", "llm_int8_skip_modules", "ignore")]
    skipped = [f"re:{rule[2:]}" for rule in given.get("dynamic") or () if rule.startswith("-:")]
    return Quantization(name, read(given), (*sum(map(tuple, left_out), ()), *skipped))


def _unknown(quantization: str) -> str:
    return (
        f"the weights of a quantization by '{quantization}' cannot be counted from the configuration:"
        " --weights-bits N plans for weights of N bits"
    )


def stored_nbytes(model: nn.Module, quantization: Quantization | None) -> dict[int, int]:
    """Bytes of every parameter, by its ``id``; parameters that are tied are one."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    stored = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            packing = None
            if quantization is not None and module is not output:
                layer = _layer(path, module, name, parameter.ndim)
                packing = quantization.packing_of(layer) if layer else None
            stored[id(parameter)] = packing.nbytes(tuple(parameter.shape)) if packing else parameter.nbytes
    return stored


def _layer(path: str, module: nn.Module, name: str, dimensions: int) -> str:
    """What a checkpoint calls the layer that a parameter is the matrix of; empty where it is none's. Experts
    are layers of their own there."""
    if isinstance(module, nn.Linear):
        return path if name == "weight" else ""
    if dimensions == 3 and path.endswith(f".{EXPERTS}"):
        return f"{path}.0.{name.replace('gate_up', 'gate')}"
    return ""


# -- the packings of each quantization ---------------------------------------------------------------


def _grouped(given: Mapping[str, Any]) -> dict[str, Packing]:
    """AWQ and GPTQ: a 16-bit scale and a zero point as wide as a weight."""
    bits = given.get("bits") or given.get("w_bit") or 4
    group = given.get("group_size") or given.get("q_group_size") or 128
    return {LINEAR: Packing(bits, 1, max(group, WHOLE), 16 + bits)}


def _bitsandbytes(given: Mapping[str, Any]) -> dict[str, Packing]:
    """A 32-bit maximum of a row, or of 64 weights; these maxima may be in 8 bits, with another of 256."""
    if given.get("load_in_8bit"):
        return {LINEAR: Packing(8, 1, WHOLE, 32)}
    return {LINEAR: Packing(4, 1, 64, 8 + 32 / 256 if given.get("bnb_4bit_use_double_quant") else 32)}


def _fp8(given: Mapping[str, Any]) -> dict[str, Packing]:
    rows, columns = given.get("weight_block_size", (128, 128)) or (WHOLE, WHOLE)
    return {LINEAR: Packing(8, rows, columns, 32)}


def _torchao(given: Mapping[str, Any]) -> dict[str, Packing]:
    """Its configuration names a class, such as Int4WeightOnlyConfig, or what that was called before."""
    kind, options = given.get("quant_type"), given.get("quant_type_kwargs") or {}
    if isinstance(kind, Mapping):
        inner = kind.get("default", kind)
        kind, options = inner.get("_type"), inner.get("_data") or {}
    width = re.search(r"(?:int|float)(\d)_?weight", str(kind), re.IGNORECASE)
    if width is None:
        raise ValueError(_unknown(f"torchao {kind}"))
    bits = int(width[1])
    if bits == 8:
        return {LINEAR: Packing(8, 1, WHOLE, 32)}
    group = options.get("group_size") or (32 if "dynamic" in str(kind).lower() else 128)
    return {LINEAR: Packing(bits, 1, group, 32)}


def _compressed(given: Mapping[str, Any]) -> dict[str, Packing]:
    """compressed-tensors: groups of layers, each with targets and what becomes of their weights."""
    packings: dict[str, Packing] = {}
    for group in given["config_groups"].values() if given.get("format") != "dense" else ():
        weights = group.get("weights")
        if weights:
            bits, tiny = weights["num_bits"], weights.get("type") == "float" and weights["num_bits"] == 4
            shared = (1, weights.get("group_size") or WHOLE)
            if weights.get("strategy") in ("tensor", "block"):
                shared = weights.get("block_structure") or (WHOLE, WHOLE)
            zero = 0 if weights.get("symmetric", True) else bits
            packing = Packing(bits, *shared, (8 if tiny else 16) + zero)
            packings |= dict.fromkeys(group.get("targets") or (LINEAR,), packing)
    return packings


READERS: dict[str, tuple[str, Callable[[Mapping[str, Any]], dict[str, Packing]]]] = {
    "awq": ("AWQ", _grouped),
    "gptq": ("GPTQ", _grouped),
    "auto-round": ("AutoRound", _grouped),
    "bitsandbytes": ("bitsandbytes", _bitsandbytes),
    "torchao": ("torchao", _torchao),
    "fp8": ("FP8", _fp8),
    "fbgemm_fp8": ("FP8", lambda given: {LINEAR: Packing(8, 1, WHOLE, 32)}),
    "compressed-tensors": ("compressed-tensors", _compressed),
    "modelopt": ("ModelOpt", _compressed),
    "mxfp4": ("MXFP4", lambda given: {EXPERTS: Packing(4, 1, 32, 8)}),
}
"""Of each ``quant_method`` its name and what reads its packings."""
