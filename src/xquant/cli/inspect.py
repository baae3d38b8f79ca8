"""``xquant inspect``: what a saved cache holds, told by its header alone, without torch or a model."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ..results import SCHEMA, STDOUT, write_json
from ..saved.header import Saved, read_header
from ..sizes import readable
from .common import json_option
from .tables import say


@click.command()
@click.argument("file")
@json_option
def inspect(file: str, json_file: str | None) -> None:
    """Say what the saved cache FILE holds, and of which model and method it is.

    Only the header is read and checked; the tensors are when the cache is loaded.
    """
    saved = read_header(Path(file))
    row = _row(saved)
    if json_file is not None:
        write_json(json_file, [row])
    if json_file == STDOUT:
        return
    header, parts = saved.header, row["bytes"]
    held = ", ".join(f"{name} {readable(size)}" for name, size in parts.items() if size)
    ratio = header.cache_bytes / header.full_cache_bytes if header.full_cache_bytes else 0.0
    lines = {
        "method": f"{header.method}, attend {header.attend}",
        "holds": f"{header.tokens} tokens x {header.batch}, {'with' if row['has_tokens'] else 'without'} ids",
        "file": f"{readable(saved.nbytes)} ({held or 'nothing yet'})",
        "entropy coded": f"{len(header.coded)} of {len(saved.sizes)} tensors",
        "fp16 cache": f"{readable(header.full_cache_bytes)}; ratio {ratio:.3f}",
        "model": f"{header.family} in {header.dtype}, {header.weights[:16]}",
        "layers": f"{len(header.layers)} compressed, {header.blocks} blocks each",
        "calibration": header.calibration[:16] or "none",
        "written by": f"xquant {header.xquant}, transformers {header.transformers}, format {header.version}",
    }
    click.echo(f"{file}:")
    for name, value in lines.items():
        say(f"  {name:13}  {value}")


def _row(saved: Saved) -> dict[str, Any]:
    """The header and the bytes of the file as plain JSON values, without the digests of tensors."""
    facts = asdict(saved.header)
    for name in ("checksums", "bases", "coded"):
        del facts[name]
    return {
        "file": str(saved.path),
        "file_bytes": saved.nbytes,
        "bytes": dict(_parts(saved)),
        "entropy_coded": len(saved.header.coded),
        "has_tokens": "tokens" in saved.sizes,
        **facts,
        "schema": SCHEMA,
    }


def _parts(saved: Saved) -> Counter[str]:
    """The bytes of the tensors by what they are."""
    compressed, found = set(map(str, saved.header.layers)), Counter[str]()
    for name, size in saved.sizes.items():
        layer, _, rest = name.partition(".")
        if not rest:
            found["ids" if name == "tokens" else "index"] += size
        elif layer not in compressed:
            found["layers not compressed"] += size
        elif rest.startswith(("conv.", "recurrent.")):
            found["states"] += size
        elif rest in ("tail", "sinks"):
            found[rest] += size
        else:
            found[rest.split(".")[1]] += size
    found["header"] = saved.nbytes - sum(saved.sizes.values())
    return found
