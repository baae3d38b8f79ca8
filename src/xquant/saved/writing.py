"""Writing a cache to a file: packed blocks as they are, each once, and all else that a cache holds."""

import hashlib
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from .. import __version__
from ..contents import others
from ..contents.contents import Contents
from ..contents.report import report_of
from ..files import replacing
from ..past.growing_layer import CompressedLayer
from ..past.slabs import Slabs
from ..quant import Streams
from . import bases, entropy
from .digest import BLANK
from .header import KIND, VERSION, Header, write_digest


def write(contents: Contents, target: Path, tokens: Tensor | None, pack: str | None) -> None:
    """Write what a cache holds; see `KVCache.save`."""
    if pack not in (None, "entropy"):
        raise ValueError(f"pack is None or 'entropy', not '{pack}'")
    if target.exists() and not target.is_file():
        raise ValueError(f"cannot save to '{target}': it is not a file")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot save to '{target}': there is no folder '{target.parent}'")
    CompressedLayer.check_finite(contents.compressed, contents.index.length)
    contents.stack.forget_unsealed()  # what is loaded holds as much as what was saved
    tensors = {**_index(contents), **_blocks(contents), **others.held(contents)}
    if tokens is not None:
        tensors["tokens"] = ids_of(contents, tokens)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    coded: entropy.Coded = {}
    if pack == "entropy":
        tensors, coded = entropy.code(tensors, _streams(contents, tensors))
    header = _header(contents, {name: checksum(t) for name, t in tensors.items()}, coded)
    with replacing(target) as file:
        try:
            save_file(tensors, file, {"format": KIND, "header": header.to_json(), "sha256": BLANK})
        except SafetensorError as error:
            raise OSError(f"cannot save to '{target}' ({str(error)[:160]})") from None
        write_digest(file)


def checksum(tensor: Tensor) -> str:
    """SHA-256 of the bytes of a contiguous tensor on the CPU."""
    return hashlib.sha256(tensor.flatten().view(torch.uint8).numpy().data).hexdigest()


def _header(contents: Contents, checksums: dict[str, str], coded: entropy.Coded) -> Header:
    attachment, report = contents.attachment, report_of(contents)
    view, first = attachment.view, contents.compressed[0]
    digests = attachment.identity.now()
    attachment.see_implementation()
    passing = {hooks.implementation for hooks in attachment.hooks.values() if hooks.passes_on}
    seen = all(hooks.passes_on for hooks in attachment.hooks.values())
    return Header(
        version=".".join(map(str, VERSION)),
        xquant=__version__,
        transformers=transformers.__version__,
        family=type(view.model).__name__,
        configuration=digests.configuration,
        weights=digests.weights,
        dtype=plain_name(first.codec.view.dtype),
        method=contents.method.spec,
        attend="store" if first.through_store else "chunk",
        calibration=first.codec.calibrated,
        bases=bases.probe(contents.method, contents.codecs),
        attention=passing.pop() if seen and len(passing) == 1 else "",
        layers=[layer.codec.view.index for layer in contents.compressed],
        recording=[i for i, own in enumerate(contents.layers) if getattr(own, "record_past", False)],
        batch=contents.index.batch,
        tokens=contents.index.length,
        blocks=first.stream.blocks,
        lengths=[[length, len(list(alike))] for length, alike in groupby(first.stream.lengths)],
        runs=[[stop, long] for stop, long in contents.index.rope_spans],
        cache_bytes=report.cache_bytes,
        full_cache_bytes=report.full_cache_bytes,
        checksums=checksums,
        coded=coded,
    )


def plain_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _index(contents: Contents) -> dict[str, Tensor]:
    """What is known of every token, and the table of blocks, which all layers have alike."""
    index, streams = contents.index, [layer.stream for layer in contents.compressed]
    if not index.length:
        return {}
    held = {"positions": index.positions, "real": index.real}
    if index.axes is not None:
        held["axes"] = index.axes
    if contents.codecs[0].embedding is not None:
        held["ids"] = index.ids
    tables = [stream.table for stream in streams if stream.table is not None]
    assert all(stream.lengths == streams[0].lengths for stream in streams)
    assert all(torch.equal(table.cpu(), tables[0].cpu()) for table in tables)
    return {**held, "table": tables[0].int()} if tables else held


def _blocks(contents: Contents) -> dict[str, Tensor]:
    """The packed blocks, tail and sinks of each compressed layer. A field that lies in several pieces of
    memory is saved in as many, so that none is copied."""
    held: dict[str, Tensor] = {}
    for layer in contents.compressed:
        number = layer.codec.view.index
        if layer.tail is not None:
            held[f"{number}.tail"] = layer.tail
            layer.built.forget()  # this cache and the saved one go on with the same bits
        if layer.sinks is not None:
            held[f"{number}.sinks"] = layer.sinks.rows
        pools = zip(layer.stream.segments, layer.stream.pool, strict=False)
        for at, (segment, fields) in enumerate(pools):
            for name, blocks in fields.items():
                if not isinstance(blocks, Slabs) and name not in segment.quantizer.ragged:
                    kind = type(segment.quantizer).__name__
                    raise ValueError(f"{kind}.ragged does not name '{name}': it could not be loaded")
                pieces = blocks.parts() if isinstance(blocks, Slabs) else [blocks.flat()]
                for piece, tensor in enumerate(pieces):
                    held[f"{number}.{at}.{name}.{piece}"] = tensor
    return held


def _streams(contents: Contents, names: Iterable[str]) -> dict[str, Streams]:
    """How the packed fields among these tensors are taken apart."""
    layers = {str(layer.codec.view.index): layer.stream for layer in contents.compressed}
    found = {}
    for name in names:
        layer, *rest = name.split(".")
        if len(rest) == 3:
            segment, field, _ = rest
            stream = layers[layer]
            quantizer = stream.segments[int(segment)].quantizer
            found[name] = quantizer.streams(field, stream.block)
    return found


def as_ids(tokens: Any) -> Tensor:
    """Ids of tokens as a tensor."""
    try:
        return torch.as_tensor(tokens, device=getattr(tokens, "device", "cpu"))
    except (RuntimeError, TypeError, ValueError):
        kind = type(tokens).__name__
        raise TypeError(f"ids of tokens are needed, not {kind}") from None


def ids_of(contents: Contents, tokens: Tensor) -> Tensor:
    """The ids of the tokens that the cache holds."""
    tokens, held = as_ids(tokens), (contents.index.batch, contents.index.length)
    if tokens.is_floating_point() or tokens.dtype == torch.bool or tokens.shape != held:
        raise ValueError(
            f"the tokens are {plain_name(tokens.dtype)} {list(tokens.shape)}, and the cache holds"
            f" {list(held)}: give the ids of exactly these"
        )
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < 2**31:
        raise ValueError("an id of a token is a number from 0 to 2147483647")
    return tokens.int()
