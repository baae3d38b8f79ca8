"""What a method may ask of a model: its attention layers, projections, norms and rotary embedding.

One general view serves every family with a pre-norm decoder, ``k_proj``/``v_proj`` (or a fused
``qkv_proj``), optional ``k_norm`` per head and standard RoPE; what differs between families is found
in the modules, not in a table of names. Whether the view is right is not assumed but checked: the
cache compares the keys and values it would rebuild with the model's own on the first tokens of every
sequence batch, and refuses the model by name if they differ.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .rope import Rope


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x`` ``[B, T, G, D]`` by ``cos``, ``sin`` ``[B, T, R]``, ``R <= D``.

    Channels past ``R`` (partial rotary embeddings) pass unchanged.
    """
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    width = cos.shape[-1]
    turned, passed = x[..., :width], x[..., width:]
    (x1, x2), (cos1, cos2), (sin1, sin2) = (t.chunk(2, -1) for t in (turned, cos, sin))
    return torch.cat((x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2, passed), -1)


def unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The inverse of `rotate`, also where ``cos`` and ``sin`` carry a scale (YaRN); computed in fp32."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    (cos1, cos2), (sin1, sin2) = (t.to(dtype).chunk(2, -1) for t in (cos, sin))
    scale = cos1 * cos2 + sin1 * sin2
    cos, sin = torch.cat([cos2, cos1], -1), torch.cat([-sin1, -sin2], -1)
    scale = torch.cat([scale, scale], -1)
    return rotate(x.to(dtype), cos / scale, sin / scale).to(x.dtype)


LARGE_PRODUCT = 1 << 22
"""Multiplications from which on oneDNN was measured to be faster than MKL."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` for ``x`` ``[..., C]`` and ``weight`` ``[N, C]``.

    torch leaves fp32 on a CPU to MKL, which uses no AVX-512 on a CPU that is not Intel's; oneDNN,
    to which it leaves bf16, does. It takes a detour for a part of ``[1, T, C]``: rows are given flat.
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

    index: int
    module: nn.Module
    norm: nn.Module | None
    hidden: int
    kv_heads: int
    query_heads: int
    head_size: int
    key_module: nn.Module  # its output, sliced by key_slice, is the raw key [B, T, G*D]
    key_slice: slice
    value_module: nn.Module
    value_slice: slice
    key_norm: nn.Module | None
    rotary_size: int = 0  # channels of a head that the rotary embedding turns
    _offline: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seen = (self.key_module, self.value_module, self.key_norm)
        named = self.module.named_children()
        self._parts = [(name, child) for name, child in named if any(child is s for s in seen)]

    def __getstate__(self) -> dict[str, Any]:
        """Without what can be computed again: views are saved with their model."""
        return {**self.__dict__, "_offline": {}}

    def offline(self, name: str, compute: Callable[[], Any]) -> Any:
        """A product of the projections that methods share, computed once until they change."""
        if name not in self._offline:
            self._offline[name] = compute()
        return self._offline[name]

    def forget_offline(self) -> None:
        self._offline.clear()

    @property
    def kv_width(self) -> int:
        """Channels of the keys (and of the values) of a token: ``G * D``."""
        return self.kv_heads * self.head_size

    @property
    def multi_head(self) -> bool:
        """Multi-head attention: every query head has its own key and value head."""
        return self.kv_heads == self.query_heads

    @property
    def dtype(self) -> torch.dtype:
        """Of the keys and values that the layer computes."""
        weight = getattr(self.value_module, "weight", None)
        if isinstance(weight, Tensor) and weight.is_floating_point():
            return weight.dtype
        known = getattr(self.value_module, "compute_dtype", None)  # HQQ
        return known or next(p.dtype for p in self.module.parameters() if p.is_floating_point())

    @property
    def device(self) -> torch.device:
        return next(_tensors(self.value_module)).device

    @property
    def key_weight(self) -> Tensor:
        """``W_k^T``: ``[G*D, d]``; of quantized weights, what they decode to."""
        return self._dense(self.key_module)[self.key_slice]

    @property
    def value_weight(self) -> Tensor:
        """``W_v^T``: ``[G*D, d]``; of quantized weights, what they decode to."""
        return self._dense(self.value_module)[self.value_slice]

    def _dense(self, module: nn.Module) -> Tensor:
        if is_plain(module):
            weight: Any = module.weight
            return weight.detach()
        decoded: Tensor = self.offline(
            f"decoded {id(module)}", lambda: decoded_weight(module, self)
        )
        return decoded

    @property
    def weights_state(self) -> list[tuple[Any, ...]]:
        """Changes when a projection or the key norm is replaced, moved, cast or written to."""
        modules = (self.key_module, self.value_module, self.key_norm)
        tensors = [t for module in modules if module is not None for t in _tensors(module)]
        return [(id(t), t.data_ptr(), t.dtype, t.device, _version(t)) for t in tensors]

    def weights_sums(self) -> list[Tensor]:
        """Numbers, int64 on the layer's device, that change when a projection or the key norm is written to
        in a way that leaves no other trace, or computes something else (an adapter was switched)."""
        projections = [self.key_module]
        if self.value_module is not self.key_module:
            projections.append(self.value_module)
        read = [*projections, self.key_norm] if self.key_norm is not None else projections
        tensors = [t for module in read for t in _tensors(module) if type(t) in PLAIN]
        probe = torch.linspace(-1, 1, self.hidden, device=self.device, dtype=self.dtype)
        for module in projections:
            if not is_plain(module):
                # What cannot be asked is told of where its weights are decoded.
                with contextlib.suppress(*REFUSALS):
                    tensors.append(module(probe[None]))
        return [number for tensor in tensors for number in _sums(tensor)]

    @property
    def outdated(self) -> bool:
        """Whether the layer has been given other projections or another key norm."""
        now = self.module._modules
        return any(now.get(name) is not module for name, module in self._parts)

    @property
    def key_bias(self) -> Tensor | None:
        return _bias(self.key_module, self.key_slice)

    @property
    def value_bias(self) -> Tensor | None:
        return _bias(self.value_module, self.value_slice)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys before RoPE and values of post-norm inputs ``x`` ``[B, T, d]``: two ``[B, T, G*D]``."""
        key = linear(x, self.key_weight, self.key_bias)
        value = linear(x, self.value_weight, self.value_bias)
        return self.finish_keys(key), value

    def finish_keys(self, raw: Tensor) -> Tensor:
        """Apply the family's key norm (Qwen3, Gemma 3) to raw keys ``[B, T, G*D]``."""
        if self.key_norm is None:
            return raw
        heads: Tensor = self.key_norm(raw.unflatten(-1, (self.kv_heads, self.head_size)))
        return heads.flatten(-2)

    def key_gain(self) -> tuple[Tensor, float] | None:
        """Of a key norm that divides by the root mean square: what it multiplies with, fp32 ``[D]``, and its
        epsilon. None where it is another norm."""
        norm: Any = self.key_norm
        names = [
            n for n in ("variance_epsilon", "eps") if isinstance(getattr(norm, n, None), float)
        ]
        if not names:
            return None
        epsilon = float(getattr(norm, names[0]))
        probe = torch.linspace(-2, 3, self.head_size, device=self.device)
        with torch.no_grad():
            gain, found = norm(torch.ones_like(probe)) * (1 + epsilon) ** 0.5, norm(probe)
        expected = probe * (probe.square().mean() + epsilon).rsqrt() * gain
        return (gain, epsilon) if torch.allclose(found, expected, rtol=1e-4) else None

    def normalize(self, residual: Tensor) -> Tensor:
        """The layer's input norm: residual stream ``[B, T, d]`` to post-norm X."""
        if self.norm is None:
            return residual
        normed: Tensor = self.norm(residual)
        return normed


@dataclass(eq=False)
class ModelView:
    """A causal language model seen as a list of attention layers.

    ``layers`` holds every attention layer in order; ``skipped`` says, by index, why a layer is left
    to transformers' own cache.
    """

    model: nn.Module
    decoder: nn.Module
    layers: list[AttentionView]
    skipped: dict[int, str]
    rope: Rope

    @property
    def compressed(self) -> list[AttentionView]:
        return [view for view in self.layers if view.index not in self.skipped]

    @property
    def outdated(self) -> bool:
        """Whether layers, or modules in them, have been replaced since."""
        layers: Any = self.decoder.layers
        now = {id(getattr(layer, "self_attn", None)) for layer in layers}
        return any(id(view.module) not in now or view.outdated for view in self.layers)


PLAIN = (Tensor, nn.Parameter)
REFUSALS = (RuntimeError, AssertionError, TypeError)
"""What libraries raise where a quantized layer cannot do what it is asked."""


def is_plain(module: nn.Module) -> bool:
    """Whether a linear layer is a product with its weight and nothing else: no adapter, no codes."""
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and type(module.weight) in PLAIN
        and module.weight.is_floating_point()
    )


def _sums(tensor: Tensor) -> list[Tensor]:
    """Sums of the bits of a tensor by rows and by columns, weighted, so that an exchange is seen as well."""
    rows = tensor.detach().reshape(len(tensor) if tensor.dim() > 1 else 1, -1).contiguous()
    bits = rows.view(torch.uint8)
    bits = F.pad(bits, (0, -bits.shape[1] % 8)).view(torch.int64)
    found = []
    for dim in (0, 1):
        sums = bits.sum(dim)
        order = torch.arange(1, 2 * len(sums), 2, device=sums.device)
        found.append((sums * order).sum())
    return found


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@torch.no_grad()
def decoded_weight(module: nn.Module, view: AttentionView) -> Tensor:
    """What the quantized weight of a linear layer decodes to, ``[out, in]`` in the view's dtype.

    Raises:
        ValueError: it cannot be had; the message says how the layer is stored.
    """
    eye = torch.eye(view.hidden, dtype=view.dtype, device=view.device)
    try:
        if isinstance(module, nn.Linear) and module.weight.is_floating_point():
            # torchao: a kind of tensor
            return F.linear(eye, module.weight).T.contiguous()
        dequantize = getattr(module, "dequantize", None)
        if callable(dequantize):  # HQQ
            decoded: Tensor = dequantize()
            return decoded.to(view.dtype)
        # Others can at least be asked: rows of the identity come out as columns of the weight.
        bias = getattr(module, "bias", None)
        return (module(eye) - (0 if bias is None else bias)).T.contiguous()
    except REFUSALS as error:
        raise ValueError(
            f"the weights of {type(module).__name__} cannot be decoded ({str(error).splitlines()[0]}):"
            " methods that keep keys and values work without, such as kivi"
        ) from error


def _bias(module: nn.Module, part: slice) -> Tensor | None:
    bias = getattr(module, "bias", None)
    return None if bias is None else bias.detach()[part]
