"""Saved caches with more than keys, values and positions of one axis: states of linear attention, images."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.caches import make_cache
from support.damaged_files import read, write
from support.models import prompt
from support.saved_caches import Run, loaded, model_of
from support.unusual_models import END, IMAGE, START, with_images
from xquant import KVCache

RECURRENT = ["qwen3_next", "qwen3_5", "granitemoehybrid", "falcon_h1"]


@pytest.mark.parametrize("pack", [None, "entropy"])
@pytest.mark.parametrize("spec", ["kivi-2bit:group=8,sink=2", "tc-2bit:group=16"])
@pytest.mark.parametrize("family", RECURRENT)
def test_states_of_linear_attention(family: str, spec: str, pack: str | None, tmp_path: Path) -> None:
    model = model_of(family)
    run = Run(model, make_cache(model, spec), torch.ones(2, 0, dtype=torch.long))
    run.forward(prompt(2, 30))
    run.forward(prompt(2, 1))
    assert run.same_with(loaded(run.cache, tmp_path / "c", pack=pack))


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_an_empty_cache_with_states(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    run = Run(model, KVCache(model, "kivi-2bit:group=8"), torch.ones(2, 0, dtype=torch.long))
    assert run.same_with(loaded(run.cache, tmp_path / "c"))


def test_states_that_are_others_are_refused(tmp_path: Path) -> None:
    model, file = model_of("qwen3_next"), tmp_path / "c"
    cache = KVCache(model, "kivi-2bit:group=8")
    with torch.inference_mode():
        model(prompt(2, 30), past_key_values=cache)
    cache.save(file)
    facts, tensors = read(file)
    name = next(name for name in tensors if ".conv." in name)
    layer = name.partition(".")[0]
    rest = {n: t for n, t in tensors.items() if not n.startswith(f"{layer}.")}
    nan = torch.full_like(tensors[name], torch.nan)
    for changed in (
        {**tensors, name: tensors[name][:1]},
        {**tensors, name: tensors[name].int()},
        {**tensors, name: nan},
        {**tensors, f"{layer}.conv.9": tensors[name].clone()},
        rest,
    ):
        write(file, facts, changed)
        with pytest.raises(ValueError, match="is damaged"):
            KVCache.load(model, file)


class _Pictured:
    """Text with an image, and what follows it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        text = prompt(2, 20) % 100 + 3
        image = torch.tensor([[START, *[IMAGE] * 4, END]]).repeat(2, 1)
        self.ids = torch.cat([text, image, prompt(2, 30, seed=1) % 100 + 3], 1)
        self.kinds = (self.ids == IMAGE).int()
        self.grids = torch.tensor([[1, 4, 4]] * 2)
        self.pixels = torch.randn(32, 96, generator=torch.Generator().manual_seed(0))
        self.positions, _ = model.model.get_rope_index(
            self.ids,
            mm_token_type_ids=self.kinds,
            image_grid_thw=self.grids,
            attention_mask=torch.ones_like(self.ids),
        )

    @torch.no_grad()
    def read(self, cache: KVCache, start: int, stop: int) -> Tensor:
        part = self.ids[:, start:stop]
        given: dict[str, Any] = {"position_ids": self.positions[:, :, start:stop]}
        given["attention_mask"] = torch.ones(2, stop)
        if bool((part == IMAGE).any()):
            given |= {"pixel_values": self.pixels, "image_grid_thw": self.grids}
            given |= {"mm_token_type_ids": self.kinds[:, start:stop]}
        logits: Tensor = self.model(input_ids=part, past_key_values=cache, **given).logits
        return logits


@pytest.mark.parametrize("spec", ["kivi-2bit:group=8,sink=2", "int8:group=8", "xquant-4bit:group=8"])
def test_positions_of_several_axes(spec: str, tmp_path: Path) -> None:
    pictured = _Pictured(with_images("Qwen2_5_VL"))
    cache = KVCache(pictured.model, spec)
    pictured.read(cache, 0, 30)
    assert cache.index.axes is not None
    other = loaded(cache, tmp_path / "c")
    assert other.index.axes is not None and torch.equal(other.index.axes, cache.index.axes)
    for start, stop in ((30, 31), (31, 50), (50, 51)):
        assert torch.equal(pictured.read(other, start, stop), pictured.read(cache, start, stop))


def test_axes_of_another_kind_are_refused(tmp_path: Path) -> None:
    pictured = _Pictured(with_images("Qwen2_5_VL"))
    cache = KVCache(pictured.model, "int8:group=8")
    pictured.read(cache, 0, 30)
    cache.save(tmp_path / "c")
    facts, tensors = read(tmp_path / "c")
    for axes in (tensors["axes"][:2], tensors["axes"].long(), tensors["axes"][:, :, 1:]):
        write(tmp_path / "c", facts, {**tensors, "axes": axes.contiguous()})
        with pytest.raises(ValueError, match="'axes' is of another type or shape"):
            KVCache.load(pictured.model, tmp_path / "c")
