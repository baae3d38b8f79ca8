"""What a method may ask of a model: its attention layers, projections, norms and rotary embedding.

`find.py` makes one `ModelView` of a model, when its first cache is made; methods, the store and kernels
read it. What differs between families is found by asking the modules, not in a table of families: `names.py`
says where attention layers are, `probe.py` what they give to a cache and where it comes from, `rotation.py`
how RoPE rotates heads. Whether the view is right is not assumed but checked: on the first tokens of every new
batch of sequences, `seam/check.py` compares the keys and values that the view gives with the model's own,
and an error names the model if they differ.

Letters: ``B`` sequences, ``T`` tokens, ``G`` key/value heads of ``D`` channels, ``d`` hidden size.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .latent import Latents
from .names import attentions
from .rope import Rope
from .weights import (
    PLAIN,
    REFUSALS,
    ask,
    bias_of,
    check_product,
    decoded_weight,
    held,
    home,
    is_plain,
    offloading,
    state,
    sums,
)

LARGE_PRODUCT = 1 << 22
"""From this many multiplications on, oneDNN was faster than MKL in fp32 on an AMD CPU."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` for ``x`` ``[..., C]`` and ``weight`` ``[N, C]``.

    torch leaves fp32 on a CPU to MKL, which uses no AVX-512 on a CPU that is not Intel's; oneDNN,
    to which torch leaves bf16, does. oneDNN is slower on a slice of ``[1, T, C]``: ``x`` is flattened to
    rows. While gradients are recorded it is always torch's own product.
    """
    rows = x.reshape(-1, x.shape[-1])
    if (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.numel() * weight.shape[0] >= LARGE_PRODUCT
        and not torch.is_grad_enabled()
        and torch.backends.mkldnn.is_available()
    ):
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    else:
        out = F.linear(rows, weight, bias)
    return out.view(*x.shape[:-1], len(weight))


@dataclass(eq=False)
class AttentionView:
    """One attention layer: ``G`` key/value heads of size ``D`` over a hidden size ``d``."""

    index: int  # ``layer_idx`` of transformers
    module: nn.Module  # the attention, ``self_attn``
    norm: nn.Module | None  # the norm before it; None where it reads the residual stream itself
    hidden: int
    kv_heads: int
    query_heads: int
    head_size: int
    key_module: nn.Module  # of its output [B, T, .] these channels are the key before norm and RoPE
    key_channels: slice | Tensor
    value_module: nn.Module  # with a fused projection the same as key_module
    value_channels: slice | Tensor
    key_norm: nn.Module | None
    value_size: int = 0  # of a head; 0 where it is head_size
    lends: bool = False  # whether layers above attend to what its cache returns, too
    latents: Latents | None = None  # where keys are latents (MLA) and values their rotated parts
    rotary_size: int = 0  # channels of a head that RoPE rotates; 0 without RoPE
    order: Tensor | None = None  # of a head's channels in the cache, see `rotation.py`; None: the model's
    unknown_keys: str = ""  # why keys before RoPE cannot be had; empty where they can
    unknown_values: str = ""  # why values cannot be computed from X
    vocabulary: int = 0  # rows of `embed`
    embed: nn.Embedding | None = None  # of token ids; None where it is not known
    _offline: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        read = (self.key_module, self.value_module, self.key_norm)
        named = self.module.named_children()
        # What `outdated` compares. The norm before attention is called where it is needed, and kept nowhere.
        self._watched = [(name, child) for name, child in named if any(child is r for r in read)]
        self.value_size = self.value_size or self.head_size
        self._back = None if self.order is None else self.order.argsort()

    def rotate_whole(self, order: Tensor, before: Tensor) -> None:
        """Have RoPE rotate whole heads, in another ``order`` of channels than ``before``: int64 ``[D]``."""
        moved = before.argsort()[order]  # places of the channels before in the order of now
        first = torch.arange(self.kv_width, device=order.device).view(-1, self.head_size)
        if isinstance(self.key_channels, slice):
            self.key_channels = self.key_channels.start + first[:, moved].flatten()
        else:
            self.key_channels = self.key_channels[first[:, moved].flatten()]
        self.order, self.rotary_size = order, self.head_size
        self._back = order.argsort()

    def __getstate__(self) -> dict[str, Any]:
        """The state without offline results. A model that is pickled or copied takes its view along."""
        return {**self.__dict__, "_offline": {}}

    def offline(self, name: str, compute: Callable[[], Any]) -> Any:
        """The result called ``name``, which is computed at the first call and kept until `forget_offline`.

        Methods share results: a name must always mean the same one.
        """
        if name not in self._offline:
            self._offline[name] = compute()
        return self._offline[name]

    def forget_offline(self) -> None:
        """Drop all results of `offline`. `codecs.py` does so when it sees that weights have changed."""
        self._offline.clear()

    @property
    def kv_width(self) -> int:
        """Channels of the keys of a token, and in most models of its values: ``G * D``."""
        return self.kv_heads * self.head_size

    @property
    def state_width(self) -> int:
        """Channels of the keys and values of a token."""
        return self.kv_width + self.kv_heads * self.value_size

    def by_head(self, states: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values ``[..., channels]`` as heads ``[..., G, D]``."""
        key, value = states
        return key.unflatten(-1, (self.kv_heads, -1)), value.unflatten(-1, (self.kv_heads, -1))

    @property
    def multi_head(self) -> bool:
        """Multi-head attention: every query head has its own key and value head."""
        return self.kv_heads == self.query_heads

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the keys and values that the layer computes."""
        weight = getattr(self.value_module, "weight", None)
        if isinstance(weight, Tensor) and weight.is_floating_point():
            return weight.dtype
        # HQQ names the dtype that it computes in; others compute in that of their unquantized parameters.
        known = getattr(self.value_module, "compute_dtype", None)
        return known or next(p.dtype for p in self.module.parameters() if p.is_floating_point())

    @property
    def device(self) -> torch.device:
        """The device of the value projection, and so of all parts of the layer."""
        return home(self.value_module)

    @property
    def key_weight(self) -> Tensor:
        """``W_k^T``: ``[G*D, d]``. Quantized weights are decoded, adapters are added."""
        self.require(keys=True, values=True)
        self._check_product(self.key_module)
        return self._part(self.key_module, self.key_channels)

    @property
    def value_weight(self) -> Tensor:
        """``W_v^T``: ``[G*D, d]``. Quantized weights are decoded, adapters are added."""
        self.require(keys=False, values=True)
        self._check_product(self.value_module)
        return self._part(self.value_module, self.value_channels)

    @property
    def stored_weights(self) -> tuple[Tensor, Tensor]:
        """The same, also where the layer rounds its inputs and is not their product."""
        key = self._part(self.key_module, self.key_channels)
        return key, self._part(self.value_module, self.value_channels)

    @property
    def weights(self) -> list[Tensor]:
        """The layer's parameters, and what quantized ones were decoded to."""
        decoded = [t for name, t in self._offline.items() if name.startswith("decoded")]
        return [*self.module.parameters(), *decoded]

    def require(self, keys: bool, values: bool) -> None:
        """Refuse a method that needs keys before RoPE, or values computed from X, where they are not known.

        Raises:
            ValueError: the message says why.
        """
        if keys and self.unknown_keys:
            raise ValueError(
                f"{self.unknown_keys}: use a method that keeps keys after RoPE, such as kivi-4bit:rope=post"
            )
        if values and self.unknown_values:
            raise ValueError(f"{self.unknown_values}: use a method that keeps values, such as kivi-4bit")

    def _part(self, module: nn.Module, channels: slice | Tensor) -> Tensor:
        if isinstance(channels, slice):
            return self._dense(module)[channels]
        name = f"channels {id(channels)} of {id(module)}"
        gathered: Tensor = self.offline(name, lambda: self._dense(module)[channels])
        return gathered

    def _dense(self, module: nn.Module) -> Tensor:
        if is_plain(module):
            weight: Any = module.weight
            return weight.detach()
        decoded: Tensor = self.offline(f"decoded {id(module)}", lambda: decoded_weight(module, self._probe))
        return decoded

    def _check_product(self, module: nn.Module) -> None:
        # Dropout in adapters is found by `seam/check.py`.
        if not is_plain(module) and not module.training:
            weight = self._dense(module)
            self.offline(f"checked {id(module)}", lambda: check_product(module, weight, self._probe))

    @property
    def _probe(self) -> Tensor:
        """An input ``[d]`` of the projections. Beside its first number, 8 bits lose much of the others."""
        probe = torch.linspace(-1, 1, self.hidden, device=self.device, dtype=self.dtype)
        probe[0] = self.hidden**0.5
        return probe

    @property
    def weights_state(self) -> list[tuple[Any, ...]]:
        """A value to compare with an earlier one. It differs after a projection or the key norm was replaced,
        moved, cast, or written to in a way that torch counts; for other writes there is `weights_sums`."""
        modules = (self.key_module, self.value_module, self.key_norm)
        return [each for module in modules if module is not None for each in state(module)]

    def weights_sums(self) -> list[Tensor]:
        """Checksums of the projections and the key norm, int64 on the layer's device. They show what
        `weights_state` misses: writes through ``.data``, and an adapter that was switched. Projections that
        are not plain are run once; dropout in them would change the sums with every call."""
        projections = [self.key_module]
        if self.value_module is not self.key_module:
            projections.append(self.value_module)
        read = [*projections, self.key_norm] if self.key_norm is not None else projections
        tensors = [t for module in read for t in held(module) if type(t) in PLAIN and not t.is_meta]
        for module in projections:
            if not is_plain(module):
                # One that cannot run on the probe is refused later, with a message: by `decoded_weight`.
                with contextlib.suppress(*REFUSALS):
                    tensors.append(ask(module, self._probe[None]))
        return [number for tensor in tensors for number in sums(tensor)]

    @property
    def outdated(self) -> bool:
        """Whether the layer has been given other projections or another key norm, or the matrix that makes
        keys and values of latents can no longer be read."""
        now = self.module._modules
        read = self.latents is None or is_plain(self.latents.projection)
        return not read or any(now.get(name) is not module for name, module in self._watched)

    @property
    def key_bias(self) -> Tensor | None:
        return self._bias(self.key_module, self.key_channels)

    @property
    def value_bias(self) -> Tensor | None:
        return self._bias(self.value_module, self.value_channels)

    def _bias(self, module: nn.Module, channels: slice | Tensor) -> Tensor | None:
        bias: Tensor | None = getattr(module, "bias", None)
        if bias is not None and (bias.is_meta or offloading(module) is not None):
            bias = self.offline(f"bias {id(module)}", lambda: bias_of(module, self._probe))
        return None if bias is None else bias.detach()[channels]

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys before RoPE and values of post-norm inputs ``x`` ``[B, T, d]``: two ``[B, T, G*D]``."""
        key = linear(x, self.key_weight, self.key_bias)
        value = linear(x, self.value_weight, self.value_bias)
        return self.finish_keys(key), value

    def finish_keys(self, raw: Tensor) -> Tensor:
        """Apply the family's key norm to raw keys ``[B, T, G*D]``: of each head (Qwen3, Gemma 3), or of all
        of them (OLMo 2)."""
        if self.key_norm is None:
            return raw
        heads = self.as_in_model(raw.unflatten(-1, (self.kv_heads, self.head_size)))
        if self.norms_all_heads:
            heads = self.key_norm(heads.flatten(-2)).view_as(heads)
        else:
            heads = self.key_norm(heads)
        return self.as_in_cache(heads).flatten(-2)

    @property
    def norms_all_heads(self) -> bool:
        """Whether the key norm is one of all heads together."""
        weight = getattr(self.key_norm, "weight", None)
        return weight is not None and self.kv_heads > 1 and weight.shape == (self.kv_width,)

    def as_in_cache(self, heads: Tensor) -> Tensor:
        """Heads ``[..., D]`` of keys or queries with their channels in the order of the cache."""
        return heads if self.order is None else heads[..., self.order]

    def as_in_model(self, heads: Tensor) -> Tensor:
        """The inverse of `as_in_cache`."""
        return heads if self._back is None else heads[..., self._back]

    def key_gain(self) -> tuple[Tensor, float] | None:
        """The gain, fp32 ``[D]``, and the epsilon of a key norm that divides by the root mean square of a
        head. None where there is no key norm or another one."""
        norm: Any = self.key_norm
        if self.norms_all_heads:
            return None
        names = [n for n in ("variance_epsilon", "eps") if isinstance(getattr(norm, n, None), float)]
        if not names:
            return None
        epsilon = float(getattr(norm, names[0]))
        probe = torch.linspace(-2, 3, self.head_size, device=self.device, dtype=torch.float32)
        with torch.no_grad():  # the norm divides ones by (1 + epsilon) ** 0.5
            gain, found = norm(torch.ones_like(probe)) * (1 + epsilon) ** 0.5, norm(probe)
        expected = probe * (probe.square().mean() + epsilon).rsqrt() * gain
        if gain.shape != probe.shape or not torch.allclose(found, expected, rtol=1e-4):
            return None
        return self.as_in_cache(gain), epsilon

    def normalize(self, residual: Tensor) -> Tensor:
        """The layer's input norm: residual stream ``[B, T, d]`` to post-norm X."""
        if self.norm is None:
            return residual
        normed: Tensor = self.norm(residual)
        return normed


@dataclass(eq=False)
class ModelView:
    """A causal language model seen as a list of attention layers.

    ``layers`` holds every attention layer in order; ``skipped`` says, by ``layer_idx``, why a layer is left
    to transformers' own cache, and ``windows`` the tokens of its window where that is the reason.
    """

    model: nn.Module
    decoder: nn.Module  # the module that has the layers
    layers: list[AttentionView]
    skipped: dict[int, str]
    windows: dict[int, int]
    rope: Rope

    @property
    def compressed(self) -> list[AttentionView]:
        """The layers whose cache is compressed: all that are not skipped."""
        return [view for view in self.layers if view.index not in self.skipped]

    @property
    def outdated(self) -> bool:
        """Whether layers, or their projections, have been replaced since this view was made."""
        now = {id(attention) for _, attention in attentions(self.decoder)}
        return any(id(view.module) not in now or view.outdated for view in self.layers)
