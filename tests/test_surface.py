"""The caches as transformers' own: each public name of a cache and of its layers does what it does there, or
says in one line why not."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from support.models import prompt, tiny
from xquant import KVCache, StaticKVCache

ROOM = 64
BEAMS = torch.tensor([1, 0])
INITIALIZED = (2, 2, 12, torch.float32, torch.device("cpu"))
CALLS: dict[str, tuple[Any, ...]] = {
    "get_seq_length": (),
    "get_max_length": (),
    "get_max_cache_shape": (),
    "get_mask_sizes": (3, 1),
    "get_query_offset": (),
    "has_previous_state": (),
    "is_recording_past": (1,),
    "get_conv_state": (1,),
    "get_recurrent_state": (1,),
    "update_conv_state": (torch.zeros(2, 3, 4), 1),
    "update_recurrent_state": (torch.zeros(2, 3, 4), 1),
    "update_indexer": (torch.zeros(2, 3, 4), 1),
    "early_initialization": INITIALIZED,
    "activate_past_recording": (),
    "batch_repeat_interleave": (2,),
    "batch_select_indices": (BEAMS[:1],),
    "reorder_cache": (BEAMS,),
    "crop": (-3,),
    "reset": (),
    "prefetch": (0,),
    "offload": (0,),
}
"""Methods of a cache, with arguments."""
OWN = {"update", "layers", "layer_class_to_replicate", "offloading", "only_non_sliding"}
"""What is tested elsewhere, or is no one's to use."""
NOT_LAYERS = {
    "cumulative_length": "the length is a number: get_seq_length",
    "num_heads": "of the model: layer.codec.view.kv_heads",
    "k_head_dim": "as num_heads",
    "v_head_dim": "as num_heads",
    "supports_early_init": "a layer alone takes no memory",
    "is_compileable": "see DIFFERENT",
    "is_croppable": "see DIFFERENT",
}
DIFFERENT = {
    (
        StaticKVCache,
        "is_compileable",
    ): "generate() would compile by itself, and make masks of four axes",
    (StaticKVCache, "is_croppable"): "it drops up to 16 tokens, which assisted decoding wants",
    (StaticKVCache, "get_mask_sizes"): "masks cover the tokens that are held, not the room",
    (StaticKVCache, "get_seq_length"): "a number, not a tensor",
    (StaticKVCache, "get_query_offset"): "a number, not a tensor",
}
REFUSED = {
    KVCache: {"offload"},
    StaticKVCache: {"offload", "batch_repeat_interleave", "batch_select_indices", "reorder_cache"},
}
FORMS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    KVCache: (lambda m: KVCache(m, "full:group=8"), lambda m: DynamicCache(config=m.config)),
    StaticKVCache: (
        lambda m: StaticKVCache(m, "kivi-16bit:group=32", ROOM),
        lambda m: StaticCache(m.config, ROOM),
    ),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


@torch.no_grad()
def filled(model: Any, make: Callable[[Any], Any], count: int = 20) -> Any:
    cache = make(model)
    if count:
        model(prompt(2, count), past_key_values=cache)
    return cache


def public(kind: Any) -> list[str]:
    return [name for name in dir(kind) if not name.startswith("_")]


def what_comes(cache: Any, name: str) -> Any:
    """What an attribute is or a method gives; an error is one line."""
    try:
        found = getattr(copy.deepcopy(cache), name)
        if name in CALLS:
            found = found(*CALLS[name])
    except Exception as error:
        assert "\n" not in str(error).strip()
        return "refused"
    return int(found) if isinstance(found, Tensor) and found.dim() == 0 else found


@pytest.mark.parametrize("count", [0, 20])
@pytest.mark.parametrize("form", FORMS)
def test_each_name_of_a_cache(model: Any, form: type, count: int) -> None:
    ours, theirs = (filled(model, make, count) for make in FORMS[form])
    for name in public(theirs):
        assert hasattr(type(ours), name) or hasattr(ours, name), name
        if name in OWN or (form, name) in DIFFERENT:
            continue
        if name not in CALLS and callable(getattr(theirs, name)):
            continue  # of a later version
        found = [what_comes(cache, name) for cache in (theirs, ours)]
        assert found[1] == found[0] or "refused" in found, (name, found)
        if found[1] == "refused" != found[0]:
            assert name in REFUSED[form], name


@pytest.mark.parametrize("form", FORMS)
def test_each_name_of_a_layer(model: Any, form: type) -> None:
    ours, theirs = (filled(model, make) for make in FORMS[form])
    for mine, own in zip(ours.layers, theirs.layers, strict=True):
        for name in set(public(own)) - NOT_LAYERS.keys():
            assert hasattr(mine, name), name
            found, wanted = getattr(mine, name), getattr(own, name)
            if callable(wanted):
                assert callable(found), name
            elif isinstance(wanted, Tensor):  # a StaticCache gives all of its room
                torch.testing.assert_close(found, wanted[:, :, :20], atol=1e-4, rtol=1e-3)
            else:
                assert found == wanted, name


@pytest.mark.parametrize("name", ["reset", "crop", "reorder_cache", "offload", "lazy_initialization"])
def test_layers_of_a_static_cache_do_not_change_alone(model: Any, name: str) -> None:
    layer = filled(model, FORMS[StaticKVCache][0]).layers[0]
    arguments = (None, None) if name == "lazy_initialization" else (1,)
    with pytest.raises(ValueError, match="StaticKVCache"):
        getattr(layer, name)(*arguments)


@pytest.mark.parametrize("family", ["glm4", "cohere2", "gemma3", "qwen3_next"])
def test_a_cache_gives_what_transformers_own_gives(family: str) -> None:
    """Keys and values of each layer in turn, with channels as the model has them."""
    model = tiny(family)
    ours, theirs = (filled(model, make) for make in FORMS[KVCache])
    assert len(ours) == len(theirs) == len(list(ours))
    for found, own in zip(ours, theirs.layers, strict=True):
        for mine, name in zip(found, ("keys", "values"), strict=False):
            wanted = getattr(own, name, None)
            assert (mine is None) == (wanted is None)
            if wanted is not None:
                torch.testing.assert_close(mine, wanted, atol=1e-3, rtol=1e-3)


def test_memory_of_a_static_cache_is_taken_early(model: Any) -> None:
    cache = StaticKVCache(model, "kivi-16bit:group=32", ROOM)
    assert not cache.is_initialized
    cache.early_initialization(*INITIALIZED)
    taken, where = cache.nbytes, [layer.addresses for layer in cache.layers]
    assert cache.is_initialized and taken and not cache.get_seq_length()
    with torch.no_grad():
        model(prompt(2, 20), past_key_values=cache)
    assert [layer.addresses for layer in cache.layers] == where and cache.nbytes == taken
