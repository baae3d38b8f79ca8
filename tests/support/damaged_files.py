"""Saved caches that are not as they should be, with every digest right again."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from xquant.saved.header import KIND, write_digest
from xquant.saved.writing import checksum

Facts = dict[str, Any]
Tensors = dict[str, Tensor]


def read(file: Path) -> tuple[Facts, Tensors]:
    with safe_open(file, "pt") as opened:
        facts = json.loads(opened.metadata()["header"])
        return facts, {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118


def write(file: Path, facts: Any, tensors: Tensors) -> None:
    """A file with these facts and tensors; digests are those of what is written."""
    if isinstance(facts, dict) and isinstance(facts.get("checksums"), dict):
        facts = {**facts, "checksums": {n: checksum(t) for n, t in tensors.items()}}
    text = facts if isinstance(facts, str) else json.dumps(facts)
    save_file(tensors, file, {"format": KIND, "header": text, "sha256": "0" * 64})
    write_digest(file)


STRANGE: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 3, 7, 10**6, 2**31, 2**47, 2**63, 10**30, 0.5, float("nan")),
    *("", "x", "9.0", "1.7", "store", "0" * 64, "w" * 10**6, [], {}, [[]], [0], [[0, 0]], [[8, 1]]),
    *(
        [[8, 2**40]],
        [[2**40, 1]],
        [[1, True]],
        [[5, False], [9, True]],
        [[0.5]],
        [None],
        {"a": "b"},
    ),
]


def fact_changes(facts: Facts) -> Iterator[tuple[str, Any]]:
    """What became of the header."""
    for name in facts:
        yield f"{name} removed", {n: fact for n, fact in facts.items() if n != name}
        for value in STRANGE:
            again = name == "checksums" and isinstance(value, dict)  # `write` makes it right
            if value != facts[name] and not again:
                yield f"{name} is {str(value)[:20]}", {**facts, name: value}
    for method in ("full:group=8", "kivi-2bit:group=9", "kivi-2bit:group=1000000000000", "nothing"):
        yield f"method is {method}", {**facts, "method": method}
    yield "method with many sinks", {**facts, "method": facts["method"] + ",sink=100000000"}
    for version in ("4.999999", "5.0", "3.0", "2.1", "4", "4.0.0", "\u0664.0"):
        yield f"version is {version}", {**facts, "version": version}
    for text in ("", "null", "[]", "[" * 100_000, "1" * 5000, '{"version": "4.0"', "{}"):
        yield f"header is {text[:20]}", text


def tensor_changes(tensors: Tensors) -> Iterator[tuple[str, Tensors]]:
    """What became of the tensors."""
    for name, tensor in tensors.items():
        rest = {n: t for n, t in tensors.items() if n != name}
        yield f"{name} removed", rest
        yield f"{name} renamed", {**rest, name + ".7": tensor}
        yield f"{name} twice", {**tensors, name + ".7": tensor.clone()}
        for change, other in one_tensor(tensor):
            if other.shape != tensor.shape or other.dtype != tensor.dtype or not same(other, tensor):
                yield f"{name} {change}", {**rest, name: other.contiguous()}


def one_tensor(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    for dim, size in enumerate(tensor.shape):
        yield f"halved along {dim}", tensor.narrow(dim, 0, size // 2)
        yield f"doubled along {dim}", torch.cat([tensor, tensor], dim)
        yield f"empty along {dim}", tensor.narrow(dim, 0, 0)
    yield "flat", tensor.flatten()
    yield "turned", tensor.flatten().view(tensor.shape[::-1])
    yield "of one more dimension", tensor[None]
    yield "a number", tensor.flatten()[:1].sum() if tensor.numel() else tensor.sum()
    for dtype in (torch.int64, torch.uint8, torch.float64, torch.float16, torch.float8_e4m3fn):
        yield f"as {dtype}", tensor.to(dtype)
    yield "of zeros", torch.zeros_like(tensor)
    if tensor.is_floating_point():
        for value in (torch.nan, torch.inf):
            yield f"of {value}", torch.full_like(tensor, value)
    elif tensor.dtype != torch.bool:
        limits = torch.iinfo(tensor.dtype)
        yield "of the largest", torch.full_like(tensor, limits.max)
        yield "of the least", torch.full_like(tensor, limits.min)
        yield "one more", tensor + 1
    else:
        yield "not", ~tensor


def same(one: Tensor, other: Tensor) -> bool:
    return one.numpy().tobytes() == other.numpy().tobytes()


def outcome(use: Callable[[], object]) -> str:
    """``used``, ``refused``, or what else came of it."""
    try:
        use()
    except ValueError as error:
        line = str(error)
        clear = type(error) is ValueError and "\n" not in line and 20 < len(line) < 500
        return "refused" if clear else f"{type(error).__name__}: {line[:400]}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:400]}"
    return "used"
