"""Calibration files that are not as they should be, and a process that uses each in a short generation.

``python -m support.fuzz_calibrations FILE SPEC START COUNT`` changes the artifact of a method in every way
there is and ``COUNT`` more at random. It says what came of every case from number ``START`` on: JSON, a line
when it begins and one when it ends. A process that dies has begun a case and not ended it.
"""

import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from support.models import prompt, tiny
from xquant import KVCache

SPECS = [
    *("kvquant-2bit-1%:group=32", "kvquant-3bit-1%:per=matrix,group=32"),
    *("kvquant-3bit-1%:datatype=nf,group=32", "kvquant-2bit-1%:per=matrix,scales=online,group=32"),
    *("kvquant-4bit:scales=online,group=32", "kvquant-2bit-5%:scales=offline,rope=post,group=32"),
    *("tc-2bit:group=32", "tc-2bit:metric=identity,group=32"),
    *("tc-1bit:basis=head,group=32", "tc-2bit:basis=keys-first,group=32", "tc-2bit:classes=2,group=32"),
    *("tc-cl-2bit:group=32", "tc-cl-2bit:reach=1,basis=head,group=32"),
    *("kvtc-4bit:group=32,tail=0,span=1", "oscar-2bit:group=32"),
]
"""`make test` takes every other one."""
DTYPES = (
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
)
FACTS = ("kind", "method", "model", "text", "version")
Tensors, Facts = dict[str, Tensor], dict[str, str]


@dataclass(frozen=True)
class Case:
    """A file; ``usable`` where it may have become another one that makes sense."""

    change: str
    content: bytes
    usable: bool = False


def small_model() -> Any:
    """Two layers that every native kernel can read."""
    return tiny("llama", num_hidden_layers=2, head_dim=32)


def header_end(content: bytes) -> int:
    """Where the tensors of a safetensors file begin."""
    return 8 + int.from_bytes(content[:8], "little")


def cases(content: bytes, spec: str, count: int) -> Iterator[Case]:
    """What becomes of the artifact of a method, the same every time."""
    tensors: Tensors = load(content)
    facts: Facts = json.loads(content[8 : header_end(content)])["__metadata__"]
    yield Case("nothing", content, usable=True)
    for name, tensor in tensors.items():
        for change, other, usable in tensor_changes(tensor):
            yield Case(f"{name} {change}", save({**tensors, name: other.contiguous()}, facts), usable)
    for change, others in name_changes(tensors):
        yield Case(change, save(others, facts))
    for change, others in fact_changes(facts):
        yield Case(change, save(tensors, others or None), change == "text is garbage")
    yield from broken(content)
    yield from random_changes(content, spec, count)


def tensor_changes(tensor: Tensor) -> Iterator[tuple[str, Tensor, bool]]:
    """What became of a tensor, and whether it may still be used."""
    for dim, size in enumerate(tensor.shape):
        yield f"halved along {dim}", tensor.narrow(dim, 0, size // 2), size < 2
        yield f"doubled along {dim}", torch.cat([tensor, tensor], dim), False
        yield f"empty along {dim}", tensor.narrow(dim, 0, 0), False
    yield "flat and one more", torch.cat([tensor.flatten(), tensor.flatten()[:1]]), False
    yield "of one more dimension", tensor[None], False
    yield "a number", tensor.flatten()[0], False
    yield "of no elements", tensor.new_empty(0), False
    for dtype in DTYPES:
        if dtype != tensor.dtype:
            yield f"as {dtype}", tensor.to(dtype), False
    limits = torch.iinfo if tensor.dtype == torch.int16 else torch.finfo
    if tensor.is_floating_point():
        for value in (torch.nan, torch.inf, -torch.inf):
            one = tensor.clone()
            one.view(-1)[-1] = value
            yield f"with {value}", one, False
            yield f"all {value}", torch.full_like(tensor, value), False
    for value in (limits(tensor.dtype).max, limits(tensor.dtype).min, 0):
        yield f"all {value}", torch.full_like(tensor, value), True
    yield "negative", -tensor, True
    yield "the other way round", tensor.flip(-1), True
    yield "upside down", tensor.flip(0), True
    yield "swapped", tensor.flatten().view(tensor.shape[::-1]), True


def name_changes(tensors: Tensors) -> Iterator[tuple[str, Tensors]]:
    for name, tensor in tensors.items():
        rest = {n: t for n, t in tensors.items() if n != name}
        yield f"{name} removed", rest
        for other in (f"{name}s", name.partition(".")[2], f"7{name}", f"0{name}", "x" * 10_000):
            yield f"{name} named {other[:20]}", {**rest, other: tensor}
            yield f"{name} also {other[:20]}", {**tensors, other: tensor.clone()}
    yield "no tensor", {}


def fact_changes(facts: Facts) -> Iterator[tuple[str, Facts]]:
    for fact in FACTS:
        yield f"{fact} removed", {f: held for f, held in facts.items() if f != fact}
        for change, value in (("empty", ""), ("garbage", "§ 1.2"), ("long", "1" * 1_000_000)):
            yield f"{fact} is {change}", {**facts, fact: value}
    for version in ("9.0.0", "0", "x.y.z", "-1", "1" * 5000):
        yield f"version is {version[:9]}", {**facts, "version": version}
    for method in ("kivi-2bit", "tc-3bit", "kvquant-16bit", "no method"):
        yield f"method is {method}", {**facts, "method": method}
    yield "no metadata", {}


def broken(content: bytes) -> Iterator[Case]:
    """Files that are cut short, or something else."""
    header = header_end(content)
    for end in (0, 1, 8, 9, header // 2, header, header + 1, len(content) // 2, len(content) - 1):
        yield Case(f"cut at {end}", content[:end])
    yield Case("longer", content + b"\0")
    yield Case("a text", b"not an artifact at all" * 100)
    for size in (0, 1, 2**31, 2**63, 2**64 - 1):
        yield Case(f"header of {size}", size.to_bytes(8, "little") + content[8:])
    for change, text in (
        ("null", b"null"),
        ("a list", b"[]"),
        ("deep", b"[" * 100_000),
        ("numbers as metadata", b'{"__metadata__":{"kind":1}}'),
        ("a strange type", b'{"0.mean":{"dtype":"Q9","shape":[1],"data_offsets":[0,1]}}'),
        ("complex", b'{"0.mean":{"dtype":"C64","shape":[0],"data_offsets":[0,0]}}'),
        ("of 4 bits", b'{"0.mean":{"dtype":"F4","shape":[0],"data_offsets":[0,0]}}'),
        ("far out", b'{"0.mean":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'),
        ("huge", b'{"0.mean":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}}'),
        ("no text", b"\xff\xfe{}"),
    ):
        yield Case(f"header is {change}", len(text).to_bytes(8, "little") + text)


def random_changes(content: bytes, spec: str, count: int) -> Iterator[Case]:
    """Some bytes that are others, half of the files in the header alone."""
    draw = random.Random(spec)
    header = header_end(content)
    for number in range(count):
        changed = bytearray(content)
        end = header if number % 2 else len(content)
        for _ in range(draw.choice((1, 2, 9))):
            at = draw.randrange(end)
            changed[at] = draw.choice((0, 48 + draw.randrange(10), draw.randrange(256)))
        yield Case(f"at random, {number}", bytes(changed), usable=True)


def outcome(use: Callable[[], Tensor]) -> str:
    """``finite``, ``refused``, or what else came of it."""
    try:
        logits = use()
    except ValueError as error:
        line = str(error)
        clear = type(error) is ValueError and "\n" not in line and 20 < len(line) < 400
        return "refused" if clear else f"{type(error).__name__}: {line[:400]}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "finite" if bool(logits.isfinite().all()) else "logits are not finite"


@torch.inference_mode()
def generate(model: Any, spec: str, file: Path) -> Tensor:
    """Logits of a prompt of two blocks and a bit, and of two tokens after it."""
    cache = KVCache(model, spec, calibration=file)
    ids = prompt(1, 77)
    parts = ids.split([75, 1, 1], 1)
    return torch.cat([model(p, past_key_values=cache, use_cache=True).logits for p in parts], 1)


def main(artifact: Path, spec: str, start: int, count: int) -> None:
    torch.set_num_threads(1)
    model, file = small_model(), artifact.with_name("changed.safetensors")
    for number, case in enumerate(cases(artifact.read_bytes(), spec, count)):
        if number < start:
            continue
        about = {"number": number, "change": case.change, "usable": case.usable}
        print(json.dumps({**about, "outcome": None}), flush=True)
        file.write_bytes(case.content)
        found = outcome(lambda: generate(model, spec, file))
        print(json.dumps({**about, "outcome": found}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
