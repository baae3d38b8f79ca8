"""Activations by formula against measured peaks: the bytes of all tensors held at a time."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from support.caches import make_cache
from support.models import prompt, tiny
from xquant import parse_method
from xquant.analysis.activations import Activations
from xquant.analysis.memory import CacheLayout
from xquant.analysis.shapes import Skeleton

LEAST, MOST = 0.65, 1.5
"""Of the measured peak."""
SIZES = {"num_hidden_layers": 3, "hidden_size": 256, "num_attention_heads": 8}
MODELS: dict[str, dict[str, Any]] = {
    "grouped": {**SIZES, "num_key_value_heads": 2, "intermediate_size": 704},
    "multi-head": {**SIZES, "num_key_value_heads": 8, "intermediate_size": 1408},
}
SPECS = (
    *("full:group=32", "kivi-4bit:group=32", "xquant-2bit:group=32", "tc-2bit:group=32"),
    *("xquant-cl-2bit:group=32,first_layers=2", "tc-cl-2bit:group=32"),
)


@cache
def model_of(name: str) -> Any:
    return tiny("llama", **MODELS[name], max_position_embeddings=2048)


def layout_of(name: str, spec: str) -> CacheLayout:
    skeleton = Skeleton(model_of(name).config, torch.float32)
    return CacheLayout(skeleton, parse_method(spec))


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that operations made and that something still holds."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
        given = {storage_of(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and (key := storage_of(x)) not in given | self._held.keys():
                storage = x.untyped_storage()
                self._held[key] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, sum(size for _, size in self._held.values()))
        return out


def storage_of(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def peak(run: Callable[[], object]) -> int:
    """The most bytes of tensors made by ``run`` that were held at a time; what an operation makes inside
    and gives back is not seen."""
    with Live() as live:
        run()
    return live.most


def measure(name: str, spec: str, context: int, batch: int, new: int) -> tuple[int, int]:
    """The peak of a pass over the last ``new`` of ``context`` tokens, and by how much the cache grew."""
    model, tokens = model_of(name), prompt(batch, context)
    held = make_cache(model, spec, kernel="reference")

    def run(part: torch.Tensor) -> None:
        model(part, past_key_values=held, use_cache=True, logits_to_keep=1)

    with torch.inference_mode():
        if new < context:
            run(tokens[:, : context - new])
        before = held.nbytes
        found = peak(lambda: run(tokens[:, context - new :]))
    return found, max(held.nbytes - before, 0)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("context", "new"), [(512, 256), (512, 1), (512, 64), (256, 256)])
def test_a_pass_takes_what_the_formula_says(name: str, spec: str, context: int, new: int) -> None:
    counted = Activations(layout_of(name, spec))
    expected = counted.decode(context, 2) if new == 1 else counted.prefill(context, 2, new)
    found, grown = measure(name, spec, context, 2, new)
    assert LEAST * found <= expected + grown <= MOST * found


def test_the_logits_count_where_there_are_many() -> None:
    wide = Skeleton(tiny("llama", vocab_size=1_000_000).config, torch.bfloat16)
    counted = Activations(CacheLayout(wide, parse_method("kivi-4bit")))
    assert 6_000_000 <= counted.decode(1, 1) < 6_100_000
    assert counted.decode(1, 3) == 3 * counted.decode(1, 1)


def test_a_chunk_is_no_longer_than_its_prompt() -> None:
    counted = Activations(layout_of("grouped", "kivi-4bit"))
    assert counted.prefill(100, 1, 1000) == counted.prefill(100, 1, 100)
    assert counted.prefill(100, 1, 50) < counted.prefill(1000, 1, 50)
