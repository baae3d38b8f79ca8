"""Attention masks: one over tokens tells what is padding, and one of four axes who sees whom."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, Gemma3Config, Gemma3ForConditionalGeneration

from support.models import COMMON, left_padded, prompt, tiny
from support.saved_caches import through_file
from xquant import KVCache, PrefixStore, StaticKVCache, compressed

SPEC, CODED, PAGED = "kivi-16bit:group=8", "kivi-8bit:group=32", "kivi-16bit:group=32"
PREFIX, ROOM = 40, 160


@pytest.fixture(scope="module")
def model() -> Any:
    """With heads that the native kernels read, and weights that make little of small errors."""
    return tiny("llama", head_dim=32, hidden_size=64, initializer_range=0.1)


# -- passes ------------------------------------------------------------------------------------------


def causal(queries: int, tokens: int) -> Tensor:
    """Bool ``[1, 1, queries, tokens]``, of the newest queries."""
    return torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries)[None, None]


def tree(held: int, branches: int, length: int) -> dict[str, Tensor]:
    """Branches of drafts, each of which sees what is held and itself."""
    own = torch.block_diag(*[torch.ones(length, length).tril()] * branches).bool()
    mask = torch.cat([torch.ones(len(own), held, dtype=torch.bool), own], 1)
    places = (held + torch.arange(length)).repeat(branches)
    return {"attention_mask": mask[None, None], "position_ids": places[None]}


def of_tree(run: Callable[..., Any], batch: int) -> None:
    """A branch of a tree is kept, and tokens follow it."""
    run(PREFIX)
    run(12, **tree(PREFIX, 3, 4))
    run.crop(8)
    run(20)
    run(1)
    run(2)


def of_packed_texts(run: Callable[..., Any], batch: int) -> None:
    """Two texts in one row, of which the second goes on."""
    mask = torch.block_diag(*(torch.ones(n, n).tril() for n in (30, 14))).bool()[None, None]
    places = torch.cat([torch.arange(30), torch.arange(14)])[None]
    run(44, attention_mask=mask, position_ids=places)
    for start, count in ((14, 20), (34, 1), (35, 3)):
        seen = causal(count, 30 + start + count).clone()
        seen[..., :30] = False
        run(count, attention_mask=seen, position_ids=start + torch.arange(count)[None])
    run(4)  # now both are seen


def of_padding_in_four_axes(run: Callable[..., Any], batch: int) -> None:
    """Rows that begin later, as only a mask of four axes tells."""
    begin, held = torch.tensor([0, 9])[:batch, None, None, None], 0
    for count in (PREFIX, 3, 17, 1):
        total = held + count
        seen = causal(count, total) & (torch.arange(total) >= begin)
        places = (torch.arange(held, total) - begin[:, 0, 0]).clamp(min=0)
        # What sees nothing is of padding: it is left out, and sees the first token here.
        seen[..., 0] |= ~seen.any(-1)
        run(count, attention_mask=seen, position_ids=places)
        held = total


def of_heads(run: Callable[..., Any], batch: int) -> None:
    """Each head sees other tokens."""
    random, held = torch.Generator().manual_seed(0), 0
    for count in (PREFIX, 5, 1, 20):
        total = held + count
        seen = causal(count, total) & (torch.rand(batch, 4, count, total, generator=random) > 0.3)
        seen[..., 0] = True
        run(count, attention_mask=seen)
        held = total


def of_one_row(run: Callable[..., Any], batch: int) -> None:
    """A mask for all queries alike."""
    run(PREFIX)
    seen = torch.ones(1, 1, 1, PREFIX + 3, dtype=torch.bool)
    seen[..., 3:9] = False
    run(3, attention_mask=seen)
    run(1, attention_mask=torch.cat([seen, seen[..., :1]], -1))


PASSES = [of_tree, of_packed_texts, of_padding_in_four_axes, of_heads, of_one_row]


class Run:
    """Passes of one cache, and their logits."""

    def __init__(self, model: Any, cache: Any, batch: int, added: bool, between: Any = None) -> None:
        self.model, self.cache, self.added, self.between = model, cache, added, between
        self.ids, self.at, self.found = prompt(batch, ROOM), 0, list[Tensor]()
        self.held = self.ids[:, :0]

    @torch.no_grad()
    def __call__(self, count: int, **inputs: Tensor) -> None:
        mask = inputs.get("attention_mask")
        if mask is not None and self.added:
            inputs["attention_mask"] = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        new = self.ids[:, self.at : self.at + count]
        self.found.append(self.model(new, past_key_values=self.cache, **inputs).logits)
        self.at, self.held = self.at + count, torch.cat([self.held, new], 1)
        if self.between is not None:
            self.cache = self.between(self.model, self.cache, self.held)

    def crop(self, count: int) -> None:
        self.cache.crop(-count)
        self.held = self.held[:, :-count]


def wanted(model: Any, passes: Any, batch: int, added: bool) -> list[Tensor]:
    run = Run(model, DynamicCache(config=model.config), batch, added)
    passes(run, batch)
    return run.found


def error(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest error of a pass, relative."""
    pairs = zip(ours, theirs, strict=True)
    errors = [float((a - b).norm() / b.norm()) for a, b in pairs]
    return max(errors)


# -- forms -------------------------------------------------------------------------------------------


FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any] | None]] = {
    "native": (lambda m: KVCache(m, CODED), None),
    "reference": (lambda m: KVCache(m, SPEC, kernel="reference"), None),
    "folded": (lambda m: KVCache(m, CODED, kernel="folded"), None),
    "of inputs": (lambda m: KVCache(m, "xquant-16bit:group=8"), None),
    "stored": (lambda m: KVCache(m, SPEC + ",tail=5", attend="store"), None),
    "static": (lambda m: StaticKVCache(m, PAGED, ROOM), None),
    "static, after RoPE": (lambda m: StaticKVCache(m, PAGED + ",rope=post", ROOM), None),
    "copied": (lambda m: KVCache(m, SPEC), lambda m, c, _: copy.deepcopy(c)),
    "static, copied": (lambda m: StaticKVCache(m, PAGED, ROOM), lambda m, c, _: copy.deepcopy(c)),
    "converted": (
        lambda m: KVCache(m, SPEC),
        lambda m, c, _: c.converted("full:group=8" if c.method.spec != "full:group=8" else SPEC),
    ),
    "loaded": (lambda m: KVCache(m, SPEC), lambda m, c, _: through_file(c)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("passes", PASSES)
def test_a_mask_of_four_axes_is_honoured(model: Any, form: str, passes: Any) -> None:
    make, between = FORMS[form]
    kinds = (False, True) if between is None else (True,)
    for added in kinds:  # bool, and added to scores
        batch = 1 if passes is of_tree else 2
        run = Run(model, make(model), batch, added, between)
        passes(run, batch)
        exact = run.cache.method.spec != KVCache(model, CODED).method.spec
        found = error(run.found, wanted(model, passes, batch, added))
        assert found < (2e-3 if exact else 0.03), found


@pytest.mark.parametrize("held", [40, 59])
@pytest.mark.parametrize("make", [KVCache, lambda *own: StaticKVCache(*own, ROOM)])
def test_a_branch_that_is_kept_is_packed_as_if_it_had_come_alone(model: Any, make: Any, held: int) -> None:
    """Drafts set ranges as other tokens do, and those that are dropped leave none, also where a block was
    sealed with them."""
    ids, found = prompt(1, 140), []
    for branches in (1, 3):
        cache, end = make(model, CODED), held + 4
        with torch.no_grad():
            model(ids[:, :held], past_key_values=cache)
            drafts = torch.cat([ids[:, held:end], prompt(1, 4 * (branches - 1), seed=9)], 1)
            model(drafts, past_key_values=cache, **tree(held, branches, 4))
            cache.crop(end)
            for start in range(end, 120, 20):
                model(ids[:, start : start + 20], past_key_values=cache)
        found.append(torch.cat([torch.cat([layer.keys, layer.values]) for layer in cache.layers]))
    other = (found[0] - found[1]).abs() > 1e-4
    assert float(other.float().mean()) < 1e-3  # a code may be another by rounding


@pytest.mark.parametrize("make", [KVCache, lambda *own: StaticKVCache(*own, ROOM)])
def test_padding_of_a_mask_over_tokens_is_known(model: Any, make: Any) -> None:
    """However the decoder is given it, and what follows."""
    inputs = left_padded([40, 9])
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    more = torch.cat([mask, mask.new_ones(2, 12)], 1)
    own, places = tree(40, 3, 4), mask.sum(1, keepdim=True) + torch.arange(4).repeat(3)
    seen = own["attention_mask"] & more[:, None, None].bool()
    found = []
    for kind in (DynamicCache, make):
        for by_position in (False, True):
            cache = kind(config=model.config) if kind is DynamicCache else kind(model, PAGED)
            first = (ids, mask) if by_position else (ids,)
            named = {} if by_position else {"attention_mask": mask}
            with torch.no_grad():
                model.model(*first, past_key_values=cache, **named)
                drafts = prompt(2, 12, seed=3)
                step = {"attention_mask": seen, "position_ids": places}
                out = model(drafts, past_key_values=cache, **step).logits
            found.append(out)
            if kind is KVCache:
                assert torch.equal(cache.index.real, more.bool())
    assert error(found, found[:1] * 4) < 2e-3


SIZES = {
    "not \\[2, 1, 3, 43\\]": [causal(3, 42), causal(2, 43), causal(3, 43).repeat(3, 1, 1, 1)],
    "of 3 sequences": [torch.ones(3, 43)],
}
SHOWING = [None, torch.ones(2, 43), causal(3, 43), causal(3, 43).float() - 1]


@pytest.mark.parametrize("make", [KVCache, lambda *own: StaticKVCache(*own, ROOM)])
def test_a_mask_of_other_sizes_is_refused(model: Any, make: Any) -> None:
    cache, new = make(model, PAGED), prompt(2, 3, seed=3)
    with torch.no_grad():
        model(prompt(2, 40), past_key_values=cache)
        for message, masks in SIZES.items():
            for mask in masks:
                with pytest.raises(ValueError, match=message):
                    model(new, attention_mask=mask, past_key_values=cache)
                assert cache.get_seq_length() == 40


@pytest.mark.parametrize("mask", SHOWING)
def test_padding_that_is_shown_later_is_read_or_refused(model: Any, mask: Any) -> None:
    """A static cache keeps no padding; one that grows reads it, with a word."""
    inputs, new = left_padded([70, 9]), prompt(2, 3, seed=3)
    if mask is not None:
        wider = torch.ones(*mask.shape[:-1], 30, dtype=mask.dtype)
        mask = torch.cat([wider, mask], -1)
    step, found = {"attention_mask": mask, "position_ids": torch.arange(70, 73)[None]}, []
    with torch.no_grad():
        for cache in (DynamicCache(config=model.config), KVCache(model, "full:group=8")):
            model(**inputs, past_key_values=cache)
            if isinstance(cache, KVCache):
                with pytest.warns(UserWarning, match="does not hide"):
                    found.append(model(new, past_key_values=cache, **step).logits)
            else:
                found.append(model(new, past_key_values=cache, **step).logits)
        static = StaticKVCache(model, PAGED, ROOM)
        model(**inputs, past_key_values=static)
        with pytest.raises(ValueError, match="does not hide"):
            model(new, past_key_values=static, **step)
        assert static.get_seq_length() == 70
    assert error(found, found[:1] * 2) < 2e-3


def test_tokens_that_are_hidden_later_are_not_seen(model: Any) -> None:
    """By a mask over tokens that hides what it showed before."""
    caches = [DynamicCache(config=model.config), KVCache(model, PAGED)]
    caches.append(StaticKVCache(model, PAGED, ROOM))
    ids, found = prompt(2, 45), list[Tensor]()
    mask = torch.ones(2, 45, dtype=torch.long)
    for cache in caches:
        with torch.no_grad():
            model(ids[:, :40], past_key_values=cache, attention_mask=mask[:, :40])
            mask[1, 5:20] = 0
            step = {"attention_mask": mask, "position_ids": torch.arange(40, 45)[None]}
            found.append(model(ids[:, 40:], past_key_values=cache, **step).logits)
            mask[1, 5:20] = 1
    assert error(found, found[:1] * 3) < 2e-3


def test_a_tree_after_a_prefix_and_in_a_compressed_call(model: Any, tmp_path: Path) -> None:
    ids, store = prompt(1, 140), PrefixStore(tmp_path, model, SPEC)
    drafts = {"input_ids": ids[:, 128:], **tree(128, 3, 4)}
    with torch.no_grad(), compressed(model, SPEC):
        cache = model(ids[:, :128], use_cache=True).past_key_values
        store.put(cache, ids[:, :128])
        found = [model(**drafts, past_key_values=cache).logits]
    own, again = DynamicCache(config=model.config), store.get(ids[:, :129])
    assert type(cache) is KVCache and again is not None
    with torch.no_grad():
        model(ids[:, :128], past_key_values=own)
        found += [model(**drafts, past_key_values=each).logits for each in (again, own)]
    assert error(found, found[-1:] * 3) < 2e-3


@pytest.mark.parametrize("make", [KVCache, lambda *own: StaticKVCache(*own, ROOM)])
def test_padding_is_known_where_a_model_makes_masks_for_its_decoder(make: Any) -> None:
    torch.manual_seed(0)
    text = {**COMMON, "head_dim": 16, "layer_types": ["full_attention"] * 5}
    sight = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    sight |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=sight, mm_tokens_per_image=4)
    model, inputs = Gemma3ForConditionalGeneration(config).eval(), left_padded([40, 9])
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 3, dtype=torch.long)], 1)
    for outer in (model, model.model):
        found = []
        for cache in (make(model, PAGED), DynamicCache(config=config.text_config)):
            with torch.no_grad():
                outer(**inputs, past_key_values=cache)
                step = {"attention_mask": mask, "past_key_values": cache}
                found.append(outer(prompt(2, 3), **step)[0])
            if isinstance(cache, KVCache):
                assert torch.equal(cache.index.real, mask.bool())
        assert error(found, found[-1:] * 2) < 2e-3
