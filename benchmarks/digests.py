"""Whether a change computes anything differently: digests of what every method packs, reads and generates.

    python benchmarks/digests.py keep     # before the change
    python benchmarks/digests.py compare  # after it: what differs, and an error if anything does

A digest covers the packed bytes of every block, the tail, the sinks, the logits of every step and the tokens
generated; where a method can, also the log-likelihoods in store mode. Models are the tests' tiny families,
with small heads (torch's kernels) and with heads that the native and the Triton kernels read, and SmolLM2.
Digests hold for one machine and one set of libraries, as `results/digests.json` names them.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import click
import torch

import xquant
from calibrated import make_cache
from interpreted import mend
from matrix import IDENTITY, LOW
from models import FAMILIES, left_padded, tiny
from xquant import KVCache, load_model, parse_method
from xquant.results.rows import environment
from xquant.text import read_text

FILE = Path(__file__).parent / "results" / "digests.json"
STEPS = 17
SMOLLM2 = (
    *("full", "int4-gs64", "nf4-gs128", "kivi-2bit", "kivi-4bit:rope=post", "asymkv-1.5bit"),
    *("crosslayer", "kvquant-3bit-1%", "xquant-2bit", "xquant-4bit", "xquant-cl-3bit"),
    *("tc-2bit", "tc-cl-2bit"),
)
WIDE = (
    *("kivi-2bit:group=32,sink=2", "kivi-4bit:group=32,rope=post,tail=5", "kivi-16bit:group=32"),
    *("int8-gs32:group=32,rope=pre", "int3:group=32,keys=channel", "nf4-gs16:group=32,rope=pre"),
    *("asymkv-1.5bit:group=32,tail=0", "crosslayer:group=32,tail=0,km=2,vm=0,kq=4,vq=0"),
    *("kvquant-3bit-1%:group=32", "kvquant-2bit-5%:group=32,per=matrix,sink=2"),
    *("xquant-4bit:group=32,form=gqa", "xquant-3bit:group=32,form=mha,rotate=true,sink=2"),
    *("xquant-cl-3bit:group=32,form=gqa", "xquant-cl-2bit:group=32,form=mha,sink=2"),
    *("tc-2bit:group=32", "tc-cl-1.5bit:group=32,sink=2"),
)
"""Specs for heads of 32."""
KERNELS = ("auto", "avx2", "folded", "reference", "triton")
IDENTICAL = ("llama", "gemma3")
"""Families for 16 bits, where all methods do the same."""
TRITON = ("qwen2",)
"""Families that Triton's interpreter, which is slow, attends for."""
MakeCache = Callable[..., KVCache]


class Digest:
    """SHA-256 over tensors, with their types and shapes."""

    def __init__(self) -> None:
        self._sum = hashlib.sha256()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._sum.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        self._sum.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())

    def hex(self) -> str:
        return self._sum.hexdigest()[:16]


def add_held(digest: Digest, cache: KVCache) -> None:
    """All that the compressed layers hold."""
    for layer in cache.compressed:
        for number, fields in enumerate(layer.stream.pool):
            for name, held in sorted(fields.items()):
                whole = held.whole() if hasattr(held, "whole") else held.flat()
                digest.add(f"{number} {name}", whole)
        sinks = layer.sinks
        kept = {"tail": layer.tail}
        if sinks is not None:
            kept |= {"sinks": sinks.rows, "sink_at": sinks.columns}
        for name, rows in kept.items():
            if rows is not None:
                digest.add(name, rows)


@torch.no_grad()
def generated(model: Any, cache: KVCache, inputs: Mapping[str, Any]) -> str:
    """Of a prefill and `STEPS` tokens of greedy decoding."""
    digest, mask = Digest(), inputs["attention_mask"]
    ids = inputs["input_ids"]
    for _ in range(STEPS):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        logits = model(
            ids, attention_mask=mask, position_ids=positions, past_key_values=cache
        ).logits[:, -1]
        ids = logits.argmax(-1, keepdim=True)
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        digest.add("logits", logits)
        digest.add("tokens", ids)
    add_held(digest, cache)
    return digest.hex()


@torch.no_grad()
def scored(model: Any, cache: KVCache, ids: torch.Tensor) -> str:
    """Of the log-likelihoods of a text, every token of which reads the store."""
    digest = Digest()
    logits = model(ids, past_key_values=cache).logits
    digest.add("loss", torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:]))
    add_held(digest, cache)
    return digest.hex()


def digests_of(
    model: Any, spec: str, kernel: str, make: MakeCache, inputs: Mapping[str, Any]
) -> dict[str, str]:
    """What a method computes on a model; or its refusal, whose message is to stay, too."""
    try:
        found = {"generated": generated(model, make(model, spec, "chunk", kernel), inputs)}
        if parse_method(spec).causal and kernel == "auto":
            ids = inputs["input_ids"][-1:]
            found["scored"] = scored(model, make(model, spec, "store", "auto"), ids)
    except ValueError as error:
        return {"refused": str(error)}
    return found


Case = tuple[str, Callable[[], dict[str, str]]]
"""Its name, and what computes its digests."""


def tiny_cases() -> Iterator[Case]:
    inputs, longer = left_padded([40, 33]), left_padded([100, 93])

    for family in FAMILIES:
        model = tiny(family)
        for spec in (*(IDENTITY if family in IDENTICAL else ()), *LOW):
            yield f"{family} {spec}", partial(digests_of, model, spec, "auto", make_cache, inputs)
    for family in FAMILIES:
        # Weights that do not blow up what rounding leaves.
        model = tiny(family, head_dim=32, hidden_size=64, initializer_range=0.05)
        for spec, kernel in product(WIDE, KERNELS):
            if kernel != "triton" or family in TRITON:
                find = partial(digests_of, model, spec, kernel, make_cache, longer)
                yield f"wide {family} {spec} {kernel}", find


def smollm2_cases() -> Iterator[Case]:
    model, tokenizer = load_model("smollm2")
    text = read_text("help-topics")
    ids = torch.tensor(tokenizer(text)["input_ids"][10000:10700])[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    made: dict[str, Any] = {}

    def make(model: Any, spec: str, attend: str, kernel: str) -> KVCache:
        method = parse_method(spec)
        kind = method.calibrated_as
        if method.needs_calibration and kind not in made:
            made[kind] = xquant.calibrate(model, tokenizer, method, text, 256, 8)
        return KVCache(model, method, attend, made.get(kind), kernel)

    for spec, kernel in product(SMOLLM2, ("auto", "reference")):
        yield f"smollm2 {spec} {kernel}", partial(digests_of, model, spec, kernel, make, inputs)


def all_digests(only: str) -> dict[str, dict[str, str]]:
    """Of the cases whose names match ``only``."""
    digests = {}
    for name, find in chain(tiny_cases(), smollm2_cases()):
        if re.search(only, name):
            digests[name] = find()
            click.echo(f"{name}: {' '.join(digests[name].values())}", err=True)
    return digests


@click.command()
@click.argument("action", type=click.Choice(["keep", "compare"]))
@click.option("--only", default="", help="Cases whose names match this regular expression.")
def main(action: str, only: str) -> None:
    torch.set_num_threads(2)
    mend()
    now = all_digests(only)
    if action == "keep":
        kept = {"environment": environment(), "digests": now}
        FILE.write_text(json.dumps(kept, indent=1) + "\n")
        return
    before = json.loads(FILE.read_text())["digests"]
    different = [name for name, digest in now.items() if before.get(name) != digest]
    for name in different:
        click.echo(f"{name}: {before.get(name)} before, {now[name]} now")
    click.echo(f"{len(now) - len(different)} of {len(now)} cases are the same")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
