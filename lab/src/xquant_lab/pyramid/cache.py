"""PyramidCache: a cache that drops the tokens which recent ones hardly attend to."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from xquant import compat
from xquant.cache.growing import KVCache
from xquant.calibration import Calibration
from xquant.contents.report import Report
from xquant.kernels.call import AttentionCall
from xquant.linear import packed_bytes
from xquant.methods import Method
from xquant.models import AttentionView
from xquant.past.tokens import TokenIndex, visible
from xquant.seam.check import check_input, places
from xquant.seam.hooks import Attachment, attached
from xquant.seam.masks import PassMask
from xquant.seam.passes import LayerInputs, ObservingCache, Route

from . import Pyramid


def cache_of(
    model: Any, method: Method, calibration: Calibration | None = None, attend: str = "chunk"
) -> "AnyCache":
    """The cache of any method: `PyramidCache` of `Pyramid`, `KVCache` of all others.

    Raises:
        ValueError: as `KVCache`.
    """
    if isinstance(method, Pyramid):
        return PyramidCache(model, method)
    return KVCache(model, method, attend=attend, calibration=calibration)


class EvictingLayer(DynamicLayer):
    """The tokens that one layer keeps: keys (after RoPE) and values, ``[B, G, K, D]`` each.

    ``columns`` int32 ``[B, K]`` says which token of the text each is, ``weights`` fp32 ``[B, K]`` how much
    recent queries attended to it. Lengths and masks are those of the whole text.

    Args:
        view: the attention layer.
        method: says how many tokens are kept.
        share: of older tokens that the layer keeps.
        index: padding and sinks of all tokens, shared by the layers of a cache.
    """

    is_croppable = False
    keys: Tensor
    values: Tensor
    columns: Tensor
    weights: Tensor

    def __init__(self, view: AttentionView, method: Pyramid, share: float, index: TokenIndex) -> None:
        super().__init__()
        self.view, self.method, self.share, self.index = view, method, share, index
        self.tokens = 0
        """Of each sequence, dropped ones too."""

    def get_seq_length(self) -> int:
        return self.tokens

    @property
    def nbytes(self) -> int:
        held = (self.keys, self.values, self.columns, self.weights) if self.tokens else ()
        return sum(tensor.nbytes for tensor in held)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        states: tuple[Tensor, Tensor] = super().update(key_states, value_states)
        batch, _, count, _ = key_states.shape
        stop, device = self.tokens + count, key_states.device
        columns = torch.arange(self.tokens, stop, dtype=torch.int32, device=device)
        columns = columns.expand(batch, -1)
        weights = torch.zeros(columns.shape, dtype=torch.float32, device=device)
        if self.tokens:
            columns = torch.cat([self.columns, columns], 1)
            weights = torch.cat([self.weights, weights], 1)
        self.columns, self.weights, self.tokens = columns, weights, stop
        return states

    def visible_to(self, mask: Tensor) -> Tensor:
        """What a mask ``[B | 1, H | 1, t, T]`` over all tokens says of those that are kept:
        ``[B, H | 1, t, K]``."""
        if self.columns.shape[1] == self.tokens:
            return mask
        mask = mask.expand(len(self.columns), -1, -1, -1)
        return mask.gather(-1, self.columns.long()[:, None, None].expand(*mask.shape[:3], -1))

    def weigh(self, call: AttentionCall) -> None:
        """Learn which tokens the newest queries ``[B, H, t, D]`` attend to, after their `update`."""
        count, groups = min(call.query.shape[2], self.method.tail), self.keys.shape[1]
        query = call.query[:, :, -count:].float().unflatten(1, (groups, -1))
        scores = torch.einsum("bghqd,bgkd->bghqk", query, self.keys.float()) * call.scaling
        if call.softcap is not None:
            scores = (scores / call.softcap).tanh() * call.softcap
        scores = scores.masked_fill(~self._seen_by(count, call.mask, groups), -torch.inf)
        if call.sink_logits is not None:
            learned = call.sink_logits.to(scores).view(*scores.shape[1:3], 1, 1)
            scores = torch.cat([scores, learned.expand(*scores.shape[:-1], 1)], -1)
        weights = scores.softmax(-1)[..., : self.columns.shape[1]]
        found = weights.nan_to_num(0).mean((1, 2, 3))  # NaN where padding asks
        self.weights = torch.lerp(self.weights, found, count / self.method.tail)

    def _seen_by(self, count: int, mask: Tensor | None, groups: int) -> Tensor:
        """Which kept tokens the newest ``count`` queries see, bool ``[B, G | 1, R | 1, count, K]``, with R
        query heads for each key head."""
        if mask is not None:
            seen = self.visible_to(visible(mask[:, :, -count:]))
            return seen.unflatten(1, (groups if seen.shape[1] > 1 else 1, -1))
        at = torch.arange(self.tokens - count, self.tokens, device=self.columns.device)
        seen = self.columns[:, None] <= at[:, None]
        seen &= self.index.real.to(seen.device).gather(1, self.columns.long())[:, None]
        return seen[:, None, None]

    def thin(self) -> None:
        """Keep sinks, the newest tokens, and of the rest those that were attended to most."""
        if not self.tokens:
            return
        kept = self.method.kept(self.tokens, self.share)
        if self.columns.shape[1] - kept < self.method.group:
            return
        newest = self.columns >= self.tokens - self.method.tail
        sinks = self.index.sink.to(newest.device).gather(1, self.columns.long())
        kept = max(kept, int((newest | sinks).sum(1).max()))
        worth = self.weights.masked_fill(newest | sinks, torch.inf)
        best = worth.sort(dim=1, descending=True, stable=True).indices[:, :kept].sort(1).values
        self.columns, self.weights = self.columns.gather(1, best), self.weights.gather(1, best)
        rows = best[:, None, :, None]
        self.keys, self.values = (
            states.gather(2, rows.expand(-1, states.shape[1], -1, states.shape[3]))
            for states in (self.keys, self.values)
        )

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError(f"{self.method.spec} has dropped tokens: its cache cannot be cropped")

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self.tokens:
            self.columns, self.weights = self.columns[indices], self.weights[indices]


class PyramidCache(DynamicCache, ObservingCache):
    """A cache of ``model`` that drops tokens as ``method`` says. It sees queries as compressed caches do.

    Layers without full attention keep the cache that transformers gives them. A forward pass that fails
    empties the cache.

    Raises:
        ValueError: a model that cannot be served; the message says why.
    """

    attachment: Attachment

    def __init__(self, model: Any, method: Pyramid) -> None:
        with attached(model) as self.attachment:
            self.method = method
            super().__init__(config=self._config)
            self.reset()

    @property
    def _config(self) -> Any:
        return compat.text_config(self.attachment.view.model)

    @property
    def evicting(self) -> list[EvictingLayer]:
        """The layers that drop tokens, bottom up."""
        return [layer for layer in self.layers if isinstance(layer, EvictingLayer)]

    def reset(self) -> None:
        view = self.attachment.view
        self.index = TokenIndex(self.method.sink, view.rope)
        self.layers = compat.default_layers(self._config)
        for position, each in enumerate(view.compressed):
            if each.latents is not None or compat.has_both(self.layers[each.index]):
                raise ValueError(f"{type(view.model).__name__} keeps more than keys and values")
            share = self.method.share(position, len(view.compressed))
            self.layers[each.index] = EvictingLayer(each, self.method, share, self.index)

    def begin(self, batch: int, length: int, mask: PassMask) -> None:
        check_input(batch, length, mask, self.index.batch, self.index.length)
        self._mask = mask

    def observe(self, given: LayerInputs) -> None:
        family = type(self.attachment.view.model).__name__
        self.index.append(*places(family, given, self._mask, self.index), given.ids)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        layer = self.layers[layer_idx]
        if not isinstance(layer, EvictingLayer):
            own: tuple[Tensor, Tensor] = layer.update(key_states, value_states, *args, **kwargs)
            return own
        if self.attachment.hooks[layer_idx].passes_on is False:
            raise ValueError(
                f"{type(self.attachment.view.model).__name__} does not leave attention to transformers'"
                f" attention function (eager or sdpa), which {self.method.spec} needs"
            )
        inputs = self.attachment.inputs(layer_idx, key_states, value_states)
        layer.update(inputs.key, inputs.value)
        return self.attachment.return_states(layer_idx, key_states, value_states, Route.NEWEST)

    def see(self, index: int, call: AttentionCall) -> None:
        self.layers[index].weigh(call)

    def answer(
        self, index: int, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        layer: EvictingLayer = self.layers[index]
        if layer.tokens == key.shape[2]:  # nothing came before
            return key, value, mask
        return layer.keys, layer.values, None if mask is None else layer.visible_to(mask)

    def finish(self, failed: bool = False) -> None:
        if failed:
            self.reset()
        for layer in self.evicting:
            layer.thin()

    def restore(self, state: Any) -> None:
        self.reset()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep (or reorder, or repeat) the sequences ``indices``."""
        for layer in self.layers:
            layer.batch_select_indices(indices)
        self.index.select(indices)

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.index.batch, device="cpu").repeat_interleave(repeats))

    def __deepcopy__(self, memo: dict[int, Any]) -> "PyramidCache":
        """A cache of its own for the same model."""
        memo[id(self.attachment)] = self.attachment
        other = memo[id(self)] = object.__new__(type(self))
        memo.update((id(layer.view), layer.view) for layer in self.evicting)
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other

    def report(self) -> Report:
        """What the cache holds, in bytes. Nothing is packed: kept tokens count as the tail."""
        view, batch = self.attachment.view, self.index.batch
        values = batch * self.index.length * sum(layer.view.state_width for layer in self.evicting)
        tail = sum(layer.nbytes for layer in self.evicting)
        others = [layer for layer in self.layers if not isinstance(layer, EvictingLayer)]
        held = [tensor for layer in others for tensor in compat.held_by(layer)]
        skipped, resident = sum(tensor.nbytes for tensor in held), tail + self.index.nbytes
        return Report(
            method=self.method.spec,
            batch=batch,
            tokens=self.index.length,
            kernel="reference (nothing is packed)",
            layers_compressed=[layer.view.index for layer in self.evicting],
            layers_skipped=dict(view.skipped),
            sealed_bytes={},
            table_bytes=0,
            sink_bytes=0,
            tail_bytes=tail,
            index_bytes=self.index.nbytes,
            skipped_bytes=skipped,
            cache_bytes=resident + skipped,
            full_cache_bytes=2 * (values + sum(tensor.numel() for tensor in held)),
            bits_per_value=0.0,
            code_bits=0.0,
            cache_ratio=resident / (2 * values) if values else 0.0,
            model_bytes=packed_bytes(view.model) + sum(p.nbytes for p in view.model.parameters()),
            codec_bytes=0,
        )


AnyCache = KVCache | PyramidCache
