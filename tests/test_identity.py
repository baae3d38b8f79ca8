"""Identity: a stored cache is of the model that made it, and of no other, whatever part of it differs."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from support.models import FAMILIES, OTHERS, pickled, prompt, tiny
from support.unusual_models import dynamic_rope, long_rope
from xquant import KVCache, PrefixStore, digests, identity, pack_weights
from xquant.identity import ModelDigests
from xquant.seam.hooks import attach

SPEC = "kivi-4bit:group=32,sink=1"
CONFIGURATION, WEIGHTS = "other configuration$", "other weights, buffers or adapters$"
BOTH = "other configuration and weights, buffers or adapters$"


def digests_of(model: Any) -> ModelDigests:
    return attach(model).identity.now()


class Lora(nn.Module):
    """An adapter as peft puts it around a layer."""

    adapter_layer_names = ("down", "up")

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.ModuleDict(), nn.ModuleDict()
        self.active_adapters: list[str] = []
        self.disable_adapters, self.merged_adapters = False, list[str]()
        self.scaling: dict[str, float] = {}

    def add(self, name: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.down[name] = nn.Linear(self.base.in_features, 4, bias=False)
        self.up[name] = nn.Linear(4, self.base.out_features, bias=False)
        self.active_adapters, self.scaling[name] = [name], 2.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        for name in () if self.disable_adapters else self.active_adapters:
            out = out + self.up[name](self.down[name](x)) * self.scaling[name]
        return out


def adapted(model: Any, path: str = "mlp.down_proj") -> Any:
    """The model with two adapters around one layer, the second in use."""
    parent, _, name = f"model.layers.1.{path}".rpartition(".")
    layer = Lora(model.get_submodule(f"{parent}.{name}"))
    layer.add("first", 3)
    layer.add("second", 4)
    setattr(model.get_submodule(parent), name, layer)
    return model


def layer_of(model: Any) -> Any:
    return model.model.layers[1]


@torch.no_grad()
def wrote(path: str) -> Callable[[], Any]:
    """A model of which one number of a tensor is another."""

    def make() -> Any:
        model = tiny("llama")
        model.get_parameter(f"model.{path}").data.flatten()[-1] += 1
        return model

    return make


def swapped() -> Any:
    model = tiny("llama")
    layers = model.model.layers
    layers[0].mlp, layers[1].mlp = layers[1].mlp, layers[0].mlp
    return model


def with_epsilon() -> Any:
    model = tiny("llama")
    layer_of(model).post_attention_layernorm.variance_epsilon = 1e-3
    return model


def with_frequencies() -> Any:
    model = tiny("llama")
    model.model.rotary_emb.inv_freq *= 0.5
    return model


def with_negated_columns() -> Any:
    model = tiny("llama")
    layer_of(model).self_attn.q_proj.weight.data[:, [1, 3]] *= -1
    return model


def rope(**parameters: Any) -> Callable[[], Any]:
    return lambda: tiny("llama", rope_parameters=parameters)


OTHERS_THAN_IT: dict[str, tuple[Callable[[], Any], str]] = {
    "mlp": (wrote("layers.1.mlp.up_proj.weight"), WEIGHTS),
    "query": (wrote("layers.0.self_attn.q_proj.weight"), WEIGHTS),
    "output": (wrote("layers.3.self_attn.o_proj.weight"), WEIGHTS),
    "key": (wrote("layers.4.self_attn.k_proj.weight"), WEIGHTS),
    "embedding": (wrote("embed_tokens.weight"), WEIGHTS),
    "norm": (wrote("layers.0.input_layernorm.weight"), WEIGHTS),
    "swapped": (swapped, WEIGHTS),
    "negated": (with_negated_columns, WEIGHTS),
    "epsilon of a module": (with_epsilon, WEIGHTS),
    "frequencies": (with_frequencies, WEIGHTS),
    "adapter of the mlp": (lambda: adapted(tiny("llama")), WEIGHTS),
    "adapter of queries": (lambda: adapted(tiny("llama"), "self_attn.q_proj"), WEIGHTS),
    "epsilon": (lambda: tiny("llama", rms_norm_eps=1e-3), BOTH),
    "activation": (lambda: tiny("llama", hidden_act="gelu"), BOTH),
    "theta": (rope(rope_type="default", rope_theta=5e5), BOTH),
    "linear": (rope(rope_type="linear", rope_theta=1e4, factor=2.0), BOTH),
    "yarn": (rope(rope_type="yarn", rope_theta=1e4, factor=2.0), BOTH),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved cache and a store of one model."""
    model, folder = tiny("llama"), tmp_path_factory.mktemp("stored")
    cache = KVCache(model, SPEC)
    with torch.no_grad():
        model(prompt(1, 140), past_key_values=cache)
    cache.save(folder / "c")
    assert PrefixStore(folder / "s", model, SPEC).put(cache, prompt(1, 140)) == [128]
    return folder


def accepted(model: Any, stored: Path) -> bool:
    found = PrefixStore(stored / "s", model, SPEC).get(prompt(1, 140))
    return found is not None and KVCache.load(model, stored / "c").get_seq_length() == 140


@pytest.mark.parametrize("kind", OTHERS_THAN_IT)
def test_another_model_is_refused(kind: str, stored: Path) -> None:
    make, why = OTHERS_THAN_IT[kind]
    model = make()
    assert PrefixStore(stored / "s", model, SPEC).get(prompt(1, 140)) is None
    with pytest.raises(ValueError, match=why) as error:
        KVCache.load(model, stored / "c")
    assert "\n" not in str(error.value) and "saved from another model" in str(error.value)


def test_another_dtype_is_refused(stored: Path) -> None:
    model = tiny("llama").bfloat16()
    assert PrefixStore(stored / "s", model, SPEC).get(prompt(1, 140)) is None
    with pytest.raises(ValueError, match="in float32, and this one is in bfloat16"):
        KVCache.load(model, stored / "c")
    mixed = tiny("llama")
    layer_of(mixed).mlp.double()
    assert digests_of(mixed).weights != digests_of(tiny("llama")).weights


def reloaded(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder)


def moved(model: Any) -> Any:
    """Its weights elsewhere in memory, read with other strides."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        if parameter.dim() == 2:
            parameter.data = parameter.data.T.contiguous().T
    return model


def packed(model: Any) -> Any:
    pack_weights(model)
    return model


def used(model: Any) -> Any:
    model.generate(prompt(), max_new_tokens=3)
    return model


SAME: dict[str, Callable[[Any, Path], Any]] = {
    "again": lambda model, _: model,
    "reloaded": reloaded,
    "moved": lambda model, _: moved(model),
    "copied": lambda model, _: copy.deepcopy(model),
    "pickled": lambda model, _: pickled(model),
    "training": lambda model, _: model.train(),
    "packed": lambda model, _: packed(model),
    "used": lambda model, _: used(model),
    "decoder": lambda model, _: model.model,
    "compiled": lambda model, _: torch.compile(model),
    "frozen": lambda model, _: model.requires_grad_(False),
}


@pytest.mark.parametrize("way", SAME)
def test_the_same_model_is_accepted(way: str, stored: Path, tmp_path: Path) -> None:
    assert accepted(SAME[way](tiny("llama"), tmp_path), stored)


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_use_changes_no_identity(family: str) -> None:
    model = tiny(family)
    before = digests_of(model)
    with torch.no_grad():
        model(prompt(), past_key_values=DynamicCache(config=model.config))
    assert digests_of(copy.deepcopy(model)) == before == digests_of(tiny(family))


@pytest.mark.parametrize("make", [long_rope, dynamic_rope])
def test_frequencies_that_follow_the_input_change_no_identity(make: Callable[[], Any]) -> None:
    model = make()
    before = digests_of(model)
    with torch.no_grad():
        model(prompt(1, 600))
    assert digests_of(model) == before == digests_of(make())


def test_what_lies_above_the_last_layer_does_not_matter(stored: Path) -> None:
    model = tiny("llama")
    assert not model.config.tie_word_embeddings
    model.model.norm.weight.data += 1
    model.lm_head.weight.data += 1
    model.config.pad_token_id, model.config.use_cache = 7, False
    assert accepted(model, stored)


def test_layers_that_are_not_compressed_count() -> None:
    """A saved cache holds their states, too."""
    kinds = ["full_attention", "sliding_attention"]
    models = [tiny("gemma3", layer_types=kinds, num_hidden_layers=2) for _ in range(2)]
    layer_of(models[0]).mlp.up_proj.weight.data[0, 0] += 1
    assert digests_of(models[0]) != digests_of(models[1])


def test_adapters_that_are_used_count() -> None:
    model = adapted(tiny("llama"))
    layer = layer_of(model).mlp.down_proj
    both, seen = digests_of(model), set[str]()
    for change in ({"active_adapters": ["first"]}, {"disable_adapters": True}):
        vars(layer).update(change)
        seen.add(digests_of(model).weights)
    assert len({both.weights, *seen}) == 3
    vars(layer).update(active_adapters=["second"], disable_adapters=False)
    assert digests_of(model) == both
    layer.up["first"].weight.data += 1
    layer.down["first"].weight.data += 1
    layer.scaling["first"] = 9.0
    assert digests_of(model) == both
    layer.scaling["second"] = 9.0
    assert digests_of(model) != both


@pytest.mark.parametrize("write", [lambda weight: weight.mul_(1.5), lambda weight: weight.data.mul_(1.5)])
@torch.no_grad()
def test_weights_that_are_written_to_are_noticed(write: Callable[[Tensor], Any], stored: Path) -> None:
    model = tiny("llama", intermediate_size=3000)  # more than is read to look for changes
    before = digests_of(model)
    write(layer_of(model).mlp.down_proj.weight)
    assert digests_of(model) != before == digests_of(tiny("llama", intermediate_size=3000))


def test_weights_are_read_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, read = tiny("llama"), list[Tensor]()
    digest = digests.digest
    monkeypatch.setattr(identity, "digest", lambda tensor: read.append(tensor) or digest(tensor))
    cache = KVCache(model, SPEC)
    with torch.no_grad():
        model(prompt(1, 140), past_key_values=cache)
    cache.save(tmp_path / "c")
    assert read
    read.clear()
    cache.save(tmp_path / "c")
    KVCache.load(model, tmp_path / "c")
    store = PrefixStore(tmp_path / "s", model, SPEC)
    store.put(cache, prompt(1, 140))
    assert store.get(prompt(1, 140)) is not None and not read


# -- weights that are not plain -------------------------------------------------------------------------


class Codes(nn.Parameter):
    """As bitsandbytes keeps a weight: codes, and beside them an object with what they are read with."""

    quant_state: Any

    def __new__(cls, scale: float) -> "Codes":
        return torch.Tensor._make_subclass(cls, torch.arange(9, dtype=torch.uint8), False)

    def __init__(self, scale: float) -> None:
        self.quant_state = SimpleNamespace(absmax=torch.full((3,), scale), state2=None, blocksize=3)


def test_what_codes_are_read_with_counts() -> None:
    seen = set()
    for scale in (1.0, 2.0, 2.0):
        model = tiny("llama")
        layer_of(model).mlp.register_parameter("codes", Codes(scale))
        seen.add(digests_of(model).weights)
    assert len(seen) == 2


def offloaded(model: Any) -> Any:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.cpu_offload(model, torch.device("cpu"))


def test_weights_that_are_offloaded_are_read_where_they_are() -> None:
    model = tiny("llama")
    view = attach(model).view
    before = digests_of(model)
    offloaded(model)
    assert next(model.parameters()).device.type == "meta"
    assert identity.Identity(view).now() == before


def test_weights_without_numbers_are_refused_in_one_line() -> None:
    model = tiny("llama")
    view = attach(model).view
    layer_of(model).mlp.to("meta")
    with pytest.raises(ValueError, match=r"has no numbers .* load the model without offloading") as e:
        identity.Identity(view).now()
    assert "\n" not in str(e.value)


def test_an_identity_survives_no_copy() -> None:
    """A model that is copied may be changed before it is asked."""
    digests_of(model := tiny("llama"))
    other = pickle.loads(pickle.dumps(attach(model).identity))
    other._view.model.model.layers[1].mlp.up_proj.weight.data += 1
    assert other.now() != digests_of(model)
