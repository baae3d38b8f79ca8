"""What one attention layer is made of, found by asking it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import latent, names, probe
from .base import AttentionView
from .rope import Rope
from .rotation import Pair, apply_rope, orders, widened
from .weights import home

EXACT = {torch.float32: 1e-4, torch.float64: 1e-4}
ROUNDED = 3e-2
"""Relative error of keys that are rotated as they should be, by dtype, and in others."""

Channels = slice | Tensor


class Unsupported(Exception):
    """Says of a model, which is named by who catches it, why it cannot be served."""


def view_attention(
    family: str, layer: Any, attention: Any, config: Any, rope: Rope, kind: str = ""
) -> AttentionView:
    """What there is to know of ``attention`` in a decoder's ``layer``.

    Args:
        family: what errors name.
        config: of the decoder.
        kind: of attention, where it is not a full one.

    Raises:
        Unsupported: it cannot be served; the message says why.
    """
    hidden, dtype = _input_of(attention, config)
    device = home(attention)
    table = rope.table(torch.empty(0, dtype=dtype, device=device), probe.TOKENS, kind)
    try:
        given = probe.ask(attention, config, hidden, dtype, identity_of(table), 0)
    except ValueError as error:
        place = names.place_of(attention)
        raise Unsupported(f"the attention of layer {place} is of another kind ({error})") from None
    key, value = given.key, given.value
    if key.dim() != 4 or key.shape[:3] != value.shape[:3]:
        raise Unsupported("its cache holds other states than keys and values of heads")
    heads, size = key.shape[1], key.shape[3]
    order, rotated, why = None, rope.width, ""
    if device.type != "meta":
        try:
            moved = probe.ask(attention, config, hidden, dtype, table, 1).key
            order, rotated = order_of(key, moved, None if table is None else rope.halves(table))
        except ValueError as error:
            why, rotated = str(error), size
    sources = sources_of(given, order, attention)
    unknown_keys = why or ("" if sources.key else "its keys are not what a projection and a norm give")
    unknown_values = "" if sources.value else "its values are not what a projection gives"
    if getattr(attention, latent.NAME, None) is not None:
        unknown_values = "its cache keeps latents (MLA), which are layer inputs compressed already"
    if any(found and not _reads(found[0], given) for found in (sources.key, sources.value)):
        unknown_values = "its keys and values are not products of its input alone"
    groups = int(getattr(attention, "num_key_value_groups", None) or 0)
    nothing = next(iter(given.modules), attention), slice(0, 0)
    key_module, key_channels = sources.key or nothing
    value_module, value_channels = sources.value or nothing
    return AttentionView(
        index=names.place_of(attention),
        module=attention,
        norm=names.module_of(layer, names.NORMS),
        hidden=hidden,
        kv_heads=heads,
        query_heads=heads * groups if groups else max(heads, int(config.num_attention_heads)),
        head_size=size,
        key_module=key_module,
        key_channels=key_channels,
        value_module=value_module,
        value_channels=value_channels,
        key_norm=sources.norm,
        value_size=value.shape[3],
        lends=bool(getattr(attention, names.LENDS, False)),
        latents=latent.latents_of(attention, key),
        rotary_size=rotated,
        order=order,
        unknown_keys=unknown_keys and f"{family}: {unknown_keys}",
        unknown_values=unknown_values and f"{family}: {unknown_values}",
    )


def _input_of(attention: nn.Module, config: Any) -> tuple[int, torch.dtype]:
    """How many channels a layer is given, and in which dtype."""
    if any(hasattr(parameter, "to_local") for parameter in attention.parameters()):
        raise Unsupported("its linear layers are sharded over devices")
    parts: list[Any] = list(attention.children())
    if not parts:
        raise Unsupported(f"its attention has no projections ({type(attention).__name__})")
    widths = [getattr(part, "in_features", None) or getattr(part, "nx", None) for part in parts]
    known = config.hidden_size in widths
    hidden = config.hidden_size if known else next(filter(None, widths), config.hidden_size)
    floating = (p.dtype for p in attention.parameters() if p.is_floating_point())
    computed = getattr(parts[0], "compute_dtype", None)  # of quantized weights
    return int(hidden), computed or next(floating, torch.float32)


def identity_of(table: Any) -> Any:
    """The table of a rotary embedding that rotates by 0, in the form of ``table``."""
    if isinstance(table, Tensor):
        return torch.ones_like(table)
    return None if table is None else (torch.ones_like(table[0]), torch.zeros_like(table[1]))


def order_of(before: Tensor, after: Tensor, angles: Pair | None) -> tuple[Tensor | None, int]:
    """The order in which a layer's heads are rotated as pairs of halves (None where they are), and how many
    channels are rotated, of keys ``[1, G, T, D]`` before and after. ``angles``: cos and sin ``[1, T, R]``.

    Raises:
        ValueError: no order gives these keys.
    """
    if torch.equal(before, after):
        return None, 0
    source, wanted = (t.transpose(1, 2).double() for t in (before, after))
    size, rotated = before.shape[-1], 0 if angles is None else angles[0].shape[-1]
    for at, order in enumerate(orders(size, rotated) if 0 < rotated <= size else ()):
        assert angles is not None
        found = apply_rope(source[..., order], *(t.double() for t in angles))
        error = (found - wanted[..., order]).norm() / wanted.norm()
        if error < EXACT.get(before.dtype, ROUNDED):
            return (order.to(before.device) if at else None), rotated
    raise ValueError("its keys are turned in a way of their own")


def rotate_whole_heads(views: Sequence[AttentionView], rope: Rope) -> None:
    """Have RoPE rotate whole heads where it rotates a part of them, the rest by 0: kernels then know one way.

    Only where all layers with RoPE are alike, as they share their angles.
    """
    with_rope = [view for view in views if view.rotary_size]
    sizes = {(view.rotary_size, view.head_size) for view in with_rope}
    if len(sizes) != 1 or any(view.unknown_keys for view in with_rope):
        return
    ((rotated, size),) = sizes
    if rotated == size or (size - rotated) % 2 or with_rope[0].device.type == "meta":
        return
    rope.width = size
    for view in with_rope:
        before = torch.arange(size, device=view.device) if view.order is None else view.order
        view.rotate_whole(widened(before, rotated), before)


class Sources(NamedTuple):
    """Where a layer's states come from; None where that is not known."""

    key: tuple[nn.Module, Channels] | None
    """What gives keys before norm and RoPE, and which of its channels they are in the order of the cache."""
    norm: nn.Module | None
    """The norm of the keys, where there is one."""
    value: tuple[nn.Module, Channels] | None


def sources_of(given: probe.Given, order: Tensor | None, attention: nn.Module) -> Sources:
    """Find keys and values among what the modules of a layer gave."""
    width, size = given.key.shape[1] * given.key.shape[3], given.key.shape[3]
    norms = {m: seen for m, seen in given.modules.items() if _is_norm(m)}
    outputs = {m: out for m, (_, out) in given.modules.items() if m not in norms}
    if given.key.device.type == "meta":
        return _by_shape(attention, outputs, norms, width)
    raw, device = probe.by_token(given.key), given.key.device
    norm = next((m for m, (_, out) in norms.items() if torch.equal(probe.by_token(out), raw)), None)
    key = _among(outputs, raw if norm is None else probe.by_token(norms[norm][0]))
    value = _among(outputs, probe.by_token(given.value))
    if key is not None and order is not None:
        key = key[0], key[1].view(-1, size)[:, order.cpu()].flatten()
    return Sources(_placed(key, device), norm, _placed(value, device))


def _reads(module: nn.Module, given: probe.Given) -> bool:
    """Whether a module was given the layer's input itself."""
    read, x = given.modules[module][0], given.x
    return x.device.type == "meta" or (read.shape == x.shape and torch.equal(read, x))


def _is_norm(module: nn.Module) -> bool:
    small = all(parameter.dim() < 2 for parameter in module.parameters())
    return (small and not isinstance(module, nn.Linear)) or "Norm" in type(module).__name__


def _placed(
    found: tuple[nn.Module, Tensor] | None, device: torch.device
) -> tuple[nn.Module, Channels] | None:
    if found is None:
        return None
    channels = probe.as_slice(found[1])
    return found[0], channels if isinstance(channels, slice) else channels.to(device)


def _among(outputs: dict[nn.Module, Tensor], wanted: Tensor) -> tuple[nn.Module, Tensor] | None:
    """The module that gives these channels ``[T, C]``, and which of its channels they are."""
    for module, out in outputs.items() if wanted.numel() else ():
        channels = probe.find_channels(wanted, probe.by_token(out))
        if channels is not None:
            return module, channels
    return None


def _by_shape(attention: Any, outputs: dict[nn.Module, Tensor], norms: dict[Any, Any], width: int) -> Sources:
    """The same of a model without weights, of which only shapes are asked."""
    norm = getattr(attention, "k_norm", None)
    norm = norm if norm in norms else None
    key, value = (getattr(attention, name, None) for name in ("k_proj", "v_proj"))
    if key in outputs and value in outputs:
        return Sources((key, slice(0, width)), norm, (value, slice(0, width)))
    for fused, out in outputs.items():
        rows = out.shape[-1]
        if rows >= 2 * width:
            keys, values = slice(rows - 2 * width, rows - width), slice(rows - width, rows)
            return Sources((fused, keys), norm, (fused, values))
    return Sources(None, norm, None)
