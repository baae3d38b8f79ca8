"""Promises: what tokens read, by whatever masks, dtypes and layers."""

from contextlib import ExitStack

import torch
from torch import Tensor, nn

from support.generation import remove
from support.models import left_padded, prompt, tiny
from support.unusual_models import END, IMAGE, START, with_images

from .forms import Form, Held
from .promise import CLOSE, LENGTH, SPEC, begun, go_on, llama, promise, same, text, theirs


@promise("chunks of a prompt and steps read every token before them")
def chunks(form: Form, stack: ExitStack) -> None:
    ids = text()
    go_on(*begun(form, stack, llama(), ids[:, :LENGTH]), ids, 7, 1, 1, 30, 1)


@promise("padding on the left is not read, nor changes what is")
def padding(form: Form, stack: ExitStack) -> None:
    model, first = llama(), left_padded([LENGTH, 60])
    ids, mask = first["input_ids"], first["attention_mask"]
    held, own = begun(form, stack, model, ids, attention_mask=mask, position_ids=places(mask))
    _with_mask(held, own, mask, 5, 1, 1, 30, 1)


@promise("padding may be added in a later pass")
def padding_later(form: Form, stack: ExitStack) -> None:
    """As when texts of unequal length are added to one batch."""
    ids = torch.cat([text()[:, :LENGTH]] * 2)
    held, own = begun(form, stack, llama(), ids)
    mask = torch.ones(2, LENGTH + 9, dtype=torch.long)
    mask[1, LENGTH : LENGTH + 5] = 0
    more = prompt(2, 9, seed=3)
    given = {"attention_mask": mask, "position_ids": places(mask)[:, LENGTH:]}
    with torch.no_grad():
        same(held(more, **given)[:, 5:], own(more, **given)[:, 5:])
    _with_mask(held, own, mask, 1, 30, 1)


def places(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
def _with_mask(held: Held, own: Held, mask: Tensor, *counts: int) -> None:
    for seed, count in enumerate(counts):
        mask = nn.functional.pad(mask, (0, count), value=1)
        given = {"attention_mask": mask, "position_ids": places(mask)[:, -count:]}
        part = prompt(len(mask), count, seed=20 + seed)
        same(held(part, **given), own(part, **given))


@promise("a mask of four axes says who sees whom: a tree of drafts")
def tree(form: Form, stack: ExitStack) -> None:
    """Two drafts from one token; one of them is dropped, and passes go on."""
    ids = text()
    held, own = begun(form, stack, llama(), ids[:, :LENGTH])
    parents = [None, 0, 1, 0, 3]  # two branches of two tokens
    sees = torch.zeros(5, 5, dtype=torch.bool)
    for at, parent in enumerate(parents):
        sees[at] = sees[at] if parent is None else sees[parent]
        sees[at, at] = True
    mask = torch.cat([torch.ones(5, LENGTH, dtype=torch.bool), sees], 1)[None, None]
    depth = torch.tensor([[0, 1, 2, 1, 2]]) + LENGTH
    drafts = prompt(1, 5, seed=4)
    with torch.no_grad():
        for given in (mask, torch.where(mask, 0.0, torch.finfo(torch.float32).min)):
            inputs = {"attention_mask": given, "position_ids": depth}
            same(held(drafts, **inputs), own(drafts, **inputs))
            for each in (held, own):
                remove(each.cache, 2)
            go_on(held, own, ids, 1)
            for each in (held, own):
                remove(each.cache, 4)
    go_on(held, own, ids, 30, 1)


@promise("a mask of four axes in the first pass: packed sequences")
def packed(form: Form, stack: ExitStack) -> None:
    ids = text()
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[100:, :100] = False
    places = torch.cat([torch.arange(100), torch.arange(LENGTH - 100)])[None]
    given = {"attention_mask": mask[None, None], "position_ids": places}
    held, own = begun(form, stack, llama(), ids[:, :LENGTH], **given)
    mask = torch.ones(3, LENGTH + 3, dtype=torch.bool).tril(LENGTH)
    mask[:, :100] = False
    given = {"attention_mask": mask[None, None]}
    given["position_ids"] = torch.arange(LENGTH - 100, LENGTH - 97)[None]
    with torch.no_grad():
        same(held(ids[:, -3:], **given), own(ids[:, -3:], **given))


@promise("models in bf16, fp16 and fp64")
def dtypes(form: Form, stack: ExitStack) -> None:
    ids = text()
    for dtype, within in ((torch.bfloat16, 0.03), (torch.float16, 4e-3), (torch.float64, CLOSE)):
        held, own = begun(form, stack, llama(dtype), ids[:, :LENGTH])
        go_on(held, own, ids, 5, 1, within=within)


@promise("autocast to bf16")
def autocast(form: Form, stack: ExitStack) -> None:
    ids = text()
    stack.enter_context(torch.autocast("cpu", torch.bfloat16))
    held, own = begun(form, stack, llama(), ids[:, :LENGTH])
    go_on(held, own, ids, 20, 1, 1, within=0.03)


@promise("another default device and dtype than the model's")
def defaults(form: Form, stack: ExitStack) -> None:
    ids, model = text(), llama()
    own = theirs(model)
    with torch.no_grad():
        own(ids[:, :LENGTH])
        want = [own(ids[:, LENGTH : LENGTH + 20]), own(ids[:, LENGTH + 20 : LENGTH + 21])]
    before = torch.get_default_dtype()
    stack.callback(torch.set_default_dtype, before)
    torch.set_default_dtype(torch.float64)
    stack.enter_context(torch.device("meta"))  # whose tensors hold nothing
    held = form.begin(model, SPEC, stack, ids[:, :LENGTH])
    with torch.no_grad():
        got = [held(ids[:, LENGTH : LENGTH + 20]), held(ids[:, LENGTH + 20 : LENGTH + 21])]
    for mine, true in zip(got, want, strict=True):
        same(mine, true)


@promise("images and text in turns, in every shape of positions")
def images(form: Form, stack: ExitStack) -> None:
    """By hand, as `generate` gives positions: none at all, of three axes, of three and the text's own."""
    model = with_images("Qwen2_5_VL")
    image = torch.tensor([[START, *[IMAGE] * 4, END]])
    words = text() % 100 + 3
    first = torch.cat([words[:, : LENGTH - 6], image], 1)
    seen = {
        "pixel_values": torch.randn(16, 96, generator=torch.Generator().manual_seed(0)),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    inputs = {**seen, "mm_token_type_ids": (first == IMAGE).int()}
    held, own = begun(form, stack, model, first, **inputs)
    last = LENGTH - 4  # an image of four tokens takes two places
    with torch.no_grad():
        for count, axes in ((5, 3), (1, 4), (1, 3)):
            where = torch.arange(last, last + count)
            given = where[None] if axes == 1 else where.expand(axes, 1, -1)
            part = prompt(1, count, seed=30 + last) % 100 + 3
            same(held(part, position_ids=given), own(part, position_ids=given))
            last += count


@promise("models with recurrent layers: linear attention, Mamba")
def hybrids(form: Form, stack: ExitStack) -> None:
    ids = text()
    kinds = ["linear_attention", "full_attention"]
    for family, changes in (("falcon_h1", {}), ("qwen3_5", {"layer_types": kinds})):
        model = tiny(family, num_hidden_layers=2, **changes)
        go_on(*begun(form, stack, model, ids[:, :LENGTH]), ids, 1, 1, 1)


@promise("models with sliding windows")
def windows(form: Form, stack: ExitStack) -> None:
    ids, kinds = text(), ["sliding_attention", "full_attention"]
    model = tiny("gemma3", num_hidden_layers=2, layer_types=kinds)
    go_on(*begun(form, stack, model, ids[:, :LENGTH]), ids, 5, 1, 1)
