"""Images and text in turns: positions of several axes, in every shape that transformers gives them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from support.method_matrix import ONE_OF_EACH as IDENTITY
from support.models import prompt
from support.unusual_models import END, IMAGE, START, VISION, with_images
from xquant import KVCache, StaticKVCache
from xquant.seam.passes import split_axes

PICTURE = torch.tensor([[START, *[IMAGE] * 4, END]])
GRID = torch.tensor([[1, 4, 4]])
TURNS = ("image", "text", "image", "text", "text")


def pixels(turn: int) -> Tensor:
    return torch.randn(16, 96, generator=torch.Generator().manual_seed(turn))


def asked(turn: int) -> Tensor:
    """The ids of what is asked in a turn."""
    text = prompt(1, 13 + turn, seed=turn) % 100 + 3
    return torch.cat([text[:, :3], PICTURE, text[:, 3:]], 1) if TURNS[turn] == "image" else text


def positions_of(model: Any, ids: Tensor) -> Tensor:
    """Positions of three axes of a whole conversation, whose images the model is told of."""
    kinds = (ids == IMAGE).int()
    grids = GRID.repeat(int(kinds.sum()) // 4, 1)
    found, model.model.rope_deltas = model.model.get_rope_index(
        ids, mm_token_type_ids=kinds, image_grid_thw=grids, attention_mask=torch.ones_like(ids)
    )
    positions: Tensor = found
    return positions


def seen(turn: int, ids: Tensor) -> dict[str, Tensor]:
    """What a call is given of the image of a turn."""
    if TURNS[turn] != "image":
        return {}
    kinds = {"mm_token_type_ids": (ids == IMAGE).int()}
    return {"pixel_values": pixels(turn), "image_grid_thw": GRID, **kinds}


def kept(model: Any, cache: Any, folder: Path | None) -> Any:
    """``cache`` itself, or as it is after it was saved and loaded."""
    if folder is None or not isinstance(cache, KVCache):
        return cache
    cache.save(folder / "cache")
    return KVCache.load(model, folder / "cache")


def generated(model: Any, cache: Any, folder: Path | None) -> tuple[Tensor, Tensor]:
    """All tokens, and the logits of the last turn, by `generate`.

    It knows where the text goes on after the first image; of a later one it is told.
    """
    ids, logits = prompt(1, 0), torch.empty(0)
    for turn in range(len(TURNS)):
        ids = torch.cat([ids, asked(turn)], 1)
        given = {**seen(turn, ids), "attention_mask": torch.ones_like(ids), "do_sample": False}
        if turn and TURNS[turn] == "image":
            given["position_ids"] = positions_of(model, ids)
        out = model.generate(
            input_ids=ids,
            past_key_values=cache,
            max_new_tokens=8,
            output_logits=True,
            return_dict_in_generate=True,
            **given,
        )
        ids, logits = out.sequences, torch.stack(out.logits)
        cache = kept(model, cache, folder)
    return ids, logits


@torch.no_grad()
def by_hand(model: Any, cache: Any, folder: Path | None) -> tuple[Tensor, Tensor]:
    """The same by forward passes: positions in all shapes, turn about."""
    ids, found = prompt(1, 0), []
    for turn in range(len(TURNS)):
        new = asked(turn)
        for part in (new, prompt(1, 1, seed=turn) % 100 + 3):
            start, ids = ids.shape[1], torch.cat([ids, part], 1)
            positions = positions_of(model, ids)[..., start:]
            if turn % 2:  # as of text, since the new tokens are
                positions = positions[:1]
            elif turn:
                text = torch.arange(start, ids.shape[1])[None, None]
                positions = torch.cat([text, positions])
            given = seen(turn, part) if part is new else {}
            out = model(part, past_key_values=cache, position_ids=positions, **given)
            found.append(out.logits)
        cache = kept(model, cache, folder)
    return ids, torch.cat(found, 1)


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", [generated, by_hand])
@pytest.mark.parametrize("name", VISION)
def test_a_conversation_with_images(name: str, way: Any, tmp_path: Path) -> None:
    model = with_images(name)
    ids, logits = way(model, DynamicCache(config=model.config), None)
    caches = [(KVCache(model, spec), None) for spec in IDENTITY]
    caches += [(KVCache(model, spec), tmp_path) for spec in IDENTITY[:2]]
    caches += [(StaticKVCache(model, "kivi-16bit:group=32", room=256), None)]
    for cache, folder in caches:
        got = way(model, cache, folder)
        assert torch.equal(got[0], ids)
        torch.testing.assert_close(got[1], logits, rtol=0, atol=1e-4)


def test_shapes_of_positions() -> None:
    text, axes = torch.arange(6).view(2, 3), torch.arange(24).view(4, 2, 3)
    assert split_axes(text, 3) == (text, None)
    for count in (3, 4):
        positions, found = split_axes(axes[:count], count)
        assert positions is None and found is not None and torch.equal(found, axes[:count])
    positions, found = split_axes(axes, 3)
    assert positions is not None and torch.equal(positions, axes[0])
    assert found is not None and torch.equal(found, axes[1:])
    positions, found = split_axes(text[None], 3)
    assert positions is None and found is not None and torch.equal(found, text.expand(3, 2, 3))
    assert split_axes(None, 3) == split_axes(axes[:2], 3) == split_axes(text[0], 3) == (None, None)


@torch.no_grad()
@pytest.mark.parametrize("name", VISION)
def test_an_image_after_text(name: str) -> None:
    """Its tokens have positions of several axes."""
    model = with_images(name)
    text = prompt(1, 20) % 100 + 3
    image = torch.cat([text[:, :3], torch.tensor([[START, *[IMAGE] * 4, END]]), text[:, 3:8]], 1)
    both, kinds = torch.cat([text, image], 1), (image == IMAGE).int()
    seen = {
        "pixel_values": torch.randn(16, 96, generator=torch.Generator().manual_seed(0)),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": kinds,
    }
    positions, _ = model.model.get_rope_index(
        both,
        mm_token_type_ids=torch.cat([torch.zeros_like(text), kinds], 1),
        image_grid_thw=seen["image_grid_thw"],
        attention_mask=torch.ones_like(both),
    )

    def turns(cache: Any) -> Tensor:
        model(input_ids=text, past_key_values=cache)
        later = {"position_ids": positions[:, :, 20:], "attention_mask": torch.ones_like(both)}
        logits: Tensor = model(input_ids=image, past_key_values=cache, **later, **seen).logits
        return logits

    want = turns(DynamicCache(config=model.config))
    for spec in IDENTITY:
        torch.testing.assert_close(turns(KVCache(model, spec)), want, rtol=0, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("spec", ["kivi-16bit:group=8,sink=2", "xquant-16bit:group=8", "kivi-4bit:group=32"])
@pytest.mark.parametrize("name", VISION)
def test_text_and_images_in_turns(name: str, spec: str) -> None:
    """Text, an image, text and an image in one cache, of two sequences with padding on the left; then tokens
    one at a time, and the last image once more after a crop."""
    model = with_images(name)
    image = torch.tensor([[START, *[IMAGE] * 4, END]]).repeat(2, 1)
    texts = [prompt(2, count, seed=count) % 100 + 3 for count in (20, 7)]
    parts = [texts[0], image, texts[1], image]
    ids = torch.cat(parts, 1)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    kinds = (ids == IMAGE).int()
    grids = torch.tensor([[1, 4, 4]] * 4)
    pixels = torch.randn(32, 96, generator=torch.Generator().manual_seed(0))
    positions, _ = model.model.get_rope_index(
        ids, mm_token_type_ids=kinds, image_grid_thw=grids, attention_mask=mask
    )

    def turns(cache: Any) -> Tensor:
        found, stop = [], 0

        def read(part: Tensor) -> None:
            nonlocal stop
            start, stop = stop, stop + part.shape[1]
            given = {"position_ids": positions[:, :, start:stop], "attention_mask": mask[:, :stop]}
            if (part == IMAGE).any():
                given |= {"pixel_values": pixels, "image_grid_thw": grids[:2]}
                given |= {"mm_token_type_ids": (part == IMAGE).int()}
            found.append(model(input_ids=part, past_key_values=cache, **given).logits)

        for part in parts:
            read(part)
        cache.crop(-image.shape[1])
        stop -= image.shape[1]
        read(image)
        after = positions.amax((0, 2))[:, None] + 1
        for step in range(6):
            given = {"position_ids": (after + step).expand(3, -1, -1)}
            given |= {"attention_mask": torch.nn.functional.pad(mask, (0, step + 1), value=1)}
            newest = found[-1][:, -1:].argmax(-1)
            found.append(model(input_ids=newest, past_key_values=cache, **given).logits)
        return torch.cat(found, 1)

    real = torch.cat([mask, mask[:, -6:], mask[:, -6:]], 1).bool()
    cache = KVCache(model, spec)
    want, got = (turns(each)[real] for each in (DynamicCache(config=model.config), cache))
    if "16bit" in spec:
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
        assert torch.equal(got.argmax(-1), want.argmax(-1))
    assert got.isfinite().all() and cache.index.axes is not None
