"""The header of a saved cache: what the file says of itself. Read without torch.

The file is a safetensors file. Its metadata hold three texts: ``format`` is `KIND`, ``header`` is the JSON
of a `Header`, and ``sha256`` is the digest of all bytes before the tensors, taken with zeros in its own
place. The header holds the digests of the tensors, so every byte of the file is under one.
"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from safetensors import SafetensorError, safe_open

from .digest import is_intact, with_digest

KIND = "xquant cache"
VERSION = (4, 0)
"""Of the format. A reader takes every minor version of its own major one, and passes over what it does not
know in the header."""
_LONGEST = 400
"""Characters of a text, at most."""

Check = Callable[[Any], bool]


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST


def _bool(value: Any) -> bool:
    return isinstance(value, bool)


def _digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**48


def _list(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _pair(first: Check, second: Check) -> Check:
    return lambda value: isinstance(value, list) and len(value) == 2 and first(value[0]) and second(value[1])


def _number(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _dict(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


Text = Annotated[str, _text]
Digest = Annotated[str, _digest]
Count = Annotated[int, _count]
Numbers = Annotated[list[int], _list(_count)]


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a saved cache is, and what it was saved from. A field is annotated with the check of what a file
    may have there."""

    version: Text
    """Of the format: ``"major.minor"``."""
    xquant: Text
    transformers: Text
    family: Text
    """The class of the model."""
    configuration: Digest
    weights: Digest
    """`identity.ModelDigests` of the model."""
    dtype: Text
    """Of the keys and values of the model."""
    method: Text
    attend: Annotated[str, lambda value: value in ("chunk", "store")]
    calibration: Annotated[str, lambda value: value == "" or _digest(value)]
    """The digest of the calibration; empty where the method has none."""
    bases: Annotated[list[list[float]], _list(_list(_number))]
    """Of each compressed layer: `bases.probe` of its codec."""
    attention: Text
    """The attention implementation to which all layers were seen to pass on what a cache returns; empty
    where that is not known."""
    layers: Numbers
    """The numbers of the compressed layers."""
    recording: Numbers
    """Those of sliding windows that keep tokens past their window until the next crop."""
    batch: Count
    tokens: Count
    """Of each sequence."""
    blocks: Count
    """That each compressed layer holds; one that several sequences share counts once."""
    lengths: Annotated[list[list[int]], _list(_pair(_count, _count))]
    """Tokens of the blocks of a sequence, from the first on: how many tokens, and how many blocks of so many
    follow each other."""
    runs: Annotated[list[list[Any]], _list(_pair(_count, _bool))]
    """Of a model with two sets of rotary frequencies: where each run of tokens ends, and whether it has those
    of long inputs."""
    cache_bytes: Count
    """Resident in the cache when it was saved."""
    full_cache_bytes: Count
    """Of the fp16 cache of the same tokens."""
    checksums: Annotated[dict[str, str], _dict(_digest)]
    """SHA-256 of each tensor's bytes, as they are in the file."""
    coded: Annotated[dict[str, list[Any]], _dict(_pair(_text, _list(_count)))]
    """Of each tensor that is entropy-coded its type and shape, see `entropy`."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))


_CHECKS: dict[str, Check] = {name: hint.__metadata__[0] for name, hint in Header.__annotations__.items()}
"""What each field of a `Header` must be."""


@dataclass(frozen=True)
class Saved:
    """A file whose header is as it was written. Its tensors were not read yet."""

    path: Path
    header: Header
    sizes: dict[str, int]
    """Bytes of each tensor."""
    nbytes: int
    """Of the whole file."""
    source: str
    """By what name safetensors opens these bytes, while the file is open."""

    def damaged(self, why: str) -> ValueError:
        return _damaged(self.path, why)


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"'{path}' is damaged or no saved cache ({why})")


def read_header(path: Path) -> Saved:
    """The header of a saved cache, read and checked; errors are those of `opened`."""
    with opened(path) as saved:
        return saved


@contextmanager
def opened(path: Path) -> Iterator[Saved]:
    """A saved cache whose header was read and checked, and whose tensors can be read while this lasts: those
    of the same file, though another may take its place.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no saved cache, cut short, altered before its tensors, or of another major version.
        OSError: it cannot be read.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no saved cache '{path}'")
    if not path.is_file():
        raise ValueError(f"'{path}' is not a file")
    with path.open("rb") as file:
        yield _read(path, file)


def _read(path: Path, file: BinaryIO) -> Saved:
    source = f"/dev/fd/{file.fileno()}"
    if not os.path.exists(source):  # a system without /proc: two files may then be read as one
        source = str(path)
    try:
        with safe_open(source, "np") as tensors:
            facts = tensors.metadata() or {}
    except SafetensorError as error:
        raise _damaged(path, str(error)[:160]) from None
    if facts.get("format") != KIND:
        raise ValueError(f"'{path}' is a safetensors file, but not a saved cache of xquant")
    if not {"header", "sha256"} <= facts.keys():
        raise _damaged(path, "it has no header")
    fields = _parsed(path, facts["header"])
    _check_version(path, fields)
    head = _head(file)
    if not is_intact(head):
        raise _damaged(path, "its header was altered")
    for name, check in _CHECKS.items():
        if name not in fields:
            raise _damaged(path, f"its header has no '{name}'")
        if not check(fields[name]):
            raise _damaged(path, f"'{name}' of its header is not what it must be")
    known = {name: fields[name] for name in _CHECKS}
    entries = json.loads(head[8:])
    entries.pop("__metadata__")
    ends = {name: entry["data_offsets"] for name, entry in entries.items()}
    sizes = {name: stop - start for name, (start, stop) in ends.items()}
    return Saved(path, Header(**known), sizes, os.fstat(file.fileno()).st_size, source)


def _parsed(path: Path, text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise _damaged(path, "its header is no JSON") from None
    if not isinstance(fields, dict):
        raise _damaged(path, "its header is no JSON object")
    return fields


def _check_version(path: Path, fields: dict[str, Any]) -> None:
    version = fields.get("version")
    match = re.fullmatch(r"([0-9]{1,6})[.]([0-9]{1,6})", version) if isinstance(version, str) else None
    if match is None:
        raise _damaged(path, "its header has no version")
    if int(match[1]) != VERSION[0]:
        raise ValueError(
            f"'{path}' is a saved cache of format {version}, and this xquant reads {VERSION[0]}.x: save it"
            " again"
        )


def _head(file: BinaryIO) -> bytes:
    """All bytes of a safetensors file before its tensors."""
    file.seek(0)
    size = file.read(8)
    return size + file.read(int.from_bytes(size, "little"))


def write_digest(path: Path) -> None:
    """Put the digest of all that lies before the tensors in its place. Sort the metadata first: safetensors
    writes them in any order, and the same cache is to be the same file."""
    with path.open("r+b") as file:
        head = _head(file)
        fields = json.loads(head[8:])
        fields["__metadata__"] = dict(sorted(fields["__metadata__"].items()))
        text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
        file.seek(0)
        file.write(with_digest(head[:8] + text.ljust(len(head) - 8)))
