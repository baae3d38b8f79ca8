"""Identity: what the keys and values of a model depend on, as two digests. Stored caches carry it.

All counts that is not known not to matter: a part that is unknown here makes a model another one, rather than
the same.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import Enum
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import compat
from .digests import digest, sample
from .linear.layer import PackedLinear
from .models import ModelView
from .models.names import FINAL_NORMS, ROTARY, layers_of, module_of
from .models.weights import PLAIN, REFUSALS, InFile, at_hand, message_of, version

NAMES = {
    "architectures",
    "attn_implementation",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "cls_token_id",
    "decoder_start_token_id",
    "dtype",
    "eos_token_id",
    "experts_implementation",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "problem_type",
    "quantization_config",
    "return_dict",
    "router_aux_loss_coef",
    "sep_token_id",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""What a configuration says beside how keys and values are computed. Dtypes are those of the weights."""
STATES = NAMES | {"training", "gradient_checkpointing", "device", "hf_device_map", "loss_type"}
"""Attributes of modules that keys and values do not depend on. Private ones do not count either."""


class ModelDigests(NamedTuple):
    """Two digests, each of 64 hexadecimal digits."""

    configuration: str
    weights: str
    """Of weights, buffers, adapters, and what else modules hold."""


class Identity:
    """What determines the keys and values that a model gives to a cache: its configuration, and all modules
    but those above the last layer that keeps something. Threads may ask at the same time."""

    def __init__(self, view: ModelView) -> None:
        self._view = view
        self._forget()

    def _forget(self) -> None:
        self._state: list[Any] = []
        self._weights = ""
        self._lock = RLock()

    def __getstate__(self) -> dict[str, Any]:
        """The model alone: one that is saved or copied may be another afterwards."""
        return {"_view": self._view}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._view = state["_view"]
        self._forget()

    @torch.no_grad()
    def now(self) -> ModelDigests:
        """The digests of the model as it is now. All weights are read at the first call, and when a look at
        some numbers of each tells that they changed.

        Raises:
            ValueError: weights that cannot be read.
        """
        with self._lock:
            parts = list(_parts(self._view))
            state = _state(parts)
            if state != self._state:
                self._weights, self._state = _digest(parts), state
            return ModelDigests(of_configuration(self._view.model.config), self._weights)


def of_configuration(config: Any) -> str:
    """A digest of all that a configuration says of how keys and values are computed."""
    return _sha256(json.dumps(_plain(config.to_dict()), sort_keys=True, default=str))


def of_tensors(named: Iterable[tuple[str, Tensor]]) -> str:
    """A digest of tensors and their names."""
    return _sha256(json.dumps([(name, digest(tensor)) for name, tensor in named]))


def _plain(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    kept = {str(name): part for name, part in value.items() if name not in NAMES}
    return {name: _plain(part) for name, part in kept.items() if not name.startswith("_")}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# -- what counts -------------------------------------------------------------------------------------

Part = str | Tensor | InFile


def _parts(view: ModelView) -> Iterator[Part]:
    """The decoder, and what stands beside it: towers for images."""
    apart = {id(module) for module in _without_effect(view) if module is not None}
    yield from _module(view.decoder, "", apart)
    inside = next(name for name, m in view.model.named_modules() if m is view.decoder)
    around = view.model
    for step in inside.split(".") if inside else ():
        for name, child in around.named_children():
            if name != step:
                yield from _module(child, f"beside {name}", apart)
        around = getattr(around, step)


def _without_effect(view: ModelView) -> Iterator[nn.Module | None]:
    """Modules above the last layer that keeps something, and one that only changes what it holds."""
    own = compat.default_layers(compat.text_config(view.model))
    last = max(i for i, layer in enumerate(own) if not compat.is_empty(layer))
    yield from list(layers_of(view.decoder))[last + 1 :]
    yield module_of(view.decoder, FINAL_NORMS)
    asked = getattr(view.model, "get_output_embeddings", None)
    yield None if asked is None else asked()
    rotary = module_of(view.decoder, ROTARY)
    kind = str(getattr(rotary, "rope_type", ""))
    if "dynamic" in kind or "longrope" in kind or view.rope.drifts or view.rope.switches:
        yield rotary  # its frequencies are those of the last input; the configuration tells them all


def _module(module: nn.Module, path: str, apart: Collection[int]) -> Iterator[Part]:
    if id(module) in apart:
        return
    idle = _idle_adapters(module)
    for child in module._modules.values():
        named: Any = getattr(child, "items", {}.items)()
        apart = {*apart, *(id(part) for name, part in named if name in idle)}
    # A packed layer computes what it did before.
    kind = nn.Linear if isinstance(module, PackedLinear) else type(module)
    yield f"{path} is {kind.__name__}"
    held = {name: value for name, value in vars(module).items() if _counts(name)}
    held |= {**module._parameters, **module._buffers}
    if isinstance(module, PackedLinear):
        held = {name: value for name, value in held.items() if name not in module.held()}
        held["weight"] = module.weight
    for name, value in sorted(held.items()):
        if isinstance(value, dict):
            value = {key: part for key, part in value.items() if key not in idle}
        if id(value) not in apart:
            if isinstance(value, Tensor):
                value = _with_numbers(module, name, value)
            yield from _value(value, f"{path}.{name}")
    for name, child in module._modules.items():
        if child is not None:
            yield from _module(child, f"{path}.{name}", apart)


def _counts(name: str) -> bool:
    return name not in STATES and not name.startswith("_")


def _idle_adapters(layer: Any) -> set[str]:
    """Of a layer with adapters (peft), the names of those that are not in use."""
    names = getattr(layer, "adapter_layer_names", ())
    used = () if getattr(layer, "disable_adapters", False) else getattr(layer, "active_adapters", ())
    merged = getattr(layer, "merged_adapters", ())
    found = {adapter for name in names for adapter in dict(getattr(layer, name, {}))}
    return found - {*used, *merged}


def _with_numbers(module: nn.Module, name: str, tensor: Tensor) -> Tensor | InFile:
    found = at_hand(module, name, tensor)
    if isinstance(found, InFile) or not found.is_meta:
        return found
    raise ValueError(
        f"'{name}' of {type(module).__name__} has no numbers (it is on the meta device, perhaps offloaded),"
        " so what this cache depends on cannot be told: load the model without offloading"
    )


def _value(value: Any, path: str, objects: int = 0) -> Iterator[Part]:
    """What an attribute says.

    Args:
        objects: how deep to look into what is neither a tensor, a collection nor plain.
    """
    if isinstance(value, InFile):
        yield path
        yield value
    elif isinstance(value, Tensor):
        yield path
        yield from _tensor(value, path)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _value(part, f"{path}[{key}]", objects)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _value(part, f"{path}[{number}]", objects)
    elif value is None or isinstance(value, bool | int | float | str | torch.dtype | Enum):
        yield f"{path} = {value!r}"
    elif objects:
        yield f"{path} is {type(value).__name__}"
        held = getattr(value, "__dict__", {})
        yield from _value({n: part for n, part in held.items() if _counts(n)}, path, objects - 1)


def _tensor(tensor: Tensor, path: str) -> Iterator[Part]:
    """A tensor, or those that one of a library for quantized weights is made of."""
    flatten = None if type(tensor) in PLAIN else getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        if type(tensor) not in PLAIN:
            held = {n: part for n, part in vars(tensor).items() if _counts(n)}
            yield from _value(held, path, objects=1)
        return
    yield type(tensor).__name__
    names, options = flatten()
    for name in names:
        yield from _value(getattr(tensor, name), f"{path}.{name}")
    yield from _value(options, path, objects=3)  # such as how inputs are rounded


# -- what it is --------------------------------------------------------------------------------------


def _state(parts: list[Part]) -> list[Any]:
    """A value to compare with an earlier one. It differs after a part was replaced, moved, cast, or written
    to in a way that torch counts; of other writes, after those that change a number that is looked at."""
    found: list[Any] = []
    looked: dict[torch.device, list[Tensor]] = {}
    for part in parts:
        if isinstance(part, str):
            found.append(part)
            continue
        if isinstance(part, InFile):
            found.append(part.state)
            continue
        found += [id(part), part.dtype, part.device, version(part)]
        if not part.is_mkldnn:
            found.append(part.data_ptr())
            looked.setdefault(part.device, []).append(sample(part))
    return [*found, *(torch.cat(each).cpu().numpy().tobytes() for each in looked.values())]


def _digest(parts: list[Part]) -> str:
    known: dict[int, str] = {}  # a tensor may have several places
    for part in parts:
        if not isinstance(part, str) and id(part) not in known:
            try:
                known[id(part)] = _bits(part)
            except REFUSALS as error:
                kind = type(part).__name__
                raise ValueError(f"the bits of a {kind} cannot be read: {message_of(error)[:160]}") from None
    return _sha256(json.dumps([p if isinstance(p, str) else known[id(p)] for p in parts]))


def _bits(part: Tensor | InFile) -> str:
    tensor = part.read() if isinstance(part, InFile) else part
    return digest(tensor.to_dense() if tensor.is_mkldnn else tensor)
