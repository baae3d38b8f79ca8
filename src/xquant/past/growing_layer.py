"""CompressedLayer: a layer of the cache as transformers knows it, and what attention reads of its past."""

import torch
from torch import Tensor

from ..models.latent import Coded, Exact
from ..models.rotation import apply_rope
from .built import States
from .growing import GrowingPast
from .layer import PastLayer
from .sinks import Sinks


class CompressedLayer(GrowingPast, PastLayer):
    """One compressed attention layer of a `KVCache`.

    `read` is what the reference attends to, and with it the truth for every backend.
    """

    # -- reading -------------------------------------------------------------------------------

    def read(self, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """What the newest tokens attend to, after their `append`.

        Args:
            key, value: the newest tokens' exact states ``[B, G, t, D]``.
            mask: as the attention function got it, ``[B, 1, t, T]`` or None.

        Returns:
            keys and values ``[B, G, T', D]`` and the mask for them. ``T' = T`` but for
            ``through_store`` with a tail, where recent tokens appear twice (exact and as stored) and
            the mask picks one of the two for every query.
        """
        past = self.tokens - key.shape[2]
        if self.through_store:
            parts = self.read_parts(past + key.shape[2])
            if self.of_pass.fresh is not None:
                exact = self.codec.exact(self.of_pass.fresh)
                start = past + key.shape[2] - self.of_pass.fresh.shape[1]
                parts.append(self.heads(exact, start))
                mask = self._band(mask, key.shape[2], start)
            states = _join(parts)
        elif past:
            new = key.transpose(1, 2), value.transpose(1, 2)
            states = _join([*self.read_parts(past), new])
        else:
            states = key, value
        self.release_below()
        return *states, mask

    def states(self) -> States:
        """Keys and values of all tokens as attention would read them, two ``[B, G, T, D]``."""
        states = _join(self.read_parts(self.tokens))
        self.release_below()
        return states

    def latents(self, whole: bool = False) -> list[Exact | Coded]:
        """The same of a layer with latents (MLA). Where its codec keeps what they are a product of, that is
        given, unless they are wanted as a ``whole``."""
        to_states, sealed = self.codec.to_states, self.stream.tokens
        if whole or to_states is None or self.through_store or not sealed:
            latent, rotated = self.states()
            return [Exact(latent[:, 0], rotated[:, 0])]
        assert self.tail is not None
        rows, sinks = self.recall(sealed), self.sinks or Sinks.none_yet(0, self.tail, None)
        self.release_below()
        assert rows is not None
        columns = torch.where(sinks.columns < 0, sealed, sinks.columns).long()
        coded = Coded(rows, *to_states, Exact(*self.codec.exact(sinks.rows.to(rows.dtype))), columns)
        return [coded, Exact(*self.built.of(self.tail))]

    def held(self) -> States:
        """All that is known of all tokens: keys (before RoPE unless the codec is `rotated`) and values, two
        ``[B, T, G*D]``. Sealed tokens as they read; sinks and tail exactly, whatever attention reads."""
        keys, values = zip(*self._parts(self.tokens, through_store=False), strict=True)
        return torch.cat(keys, 1), torch.cat(values, 1)

    def heads(self, states: States, start: int) -> States:
        """States ``[B, t, G*D]`` of the tokens from ``start`` on to rotated heads ``[B, t, G, D]``."""
        view = self.codec.view
        key, value = view.by_head(states)
        if not self.codec.rotated:
            cos, sin = self.index.rope(key)
            stop = start + key.shape[1]
            key = apply_rope(key, cos[:, start:stop], sin[:, start:stop])
        return key, value

    def _parts(self, tokens: int, through_store: bool) -> list[States]:
        """Keys (before RoPE unless the codec is `rotated`) and values ``[B, t, G*D]`` of the first ``tokens``
        tokens, in order: those that come from codes, with ``through_store`` also of the tail, then those of
        the tail, exactly."""
        assert self.tail is not None
        sinks = self.tail[:, :0] if self.sinks is None else self.sinks.rows.to(self.tail.dtype)
        tail = self.tail
        if not through_store:
            tail = tail[:, : max(tokens - self.stream.tokens, 0)]
            tokens = min(tokens, self.stream.tokens)
        exact_tail = self.built.of(tail)
        if not tokens:
            return [exact_tail]
        exact_sinks = self.codec.exact(sinks)
        recalled = self.of_pass.recalled if self.of_pass.recalled is not None else self.recall(tokens)
        assert recalled is not None
        coded = []
        each = self.codec.rebuild(recalled[:, :tokens]), exact_sinks, exact_tail
        for rows, of_sinks, of_tail in zip(*each, strict=True):
            if self.sinks is not None:
                rows = self.sinks.placed(rows, of_sinks)
            if through_store:
                rows = self._with_tail_sinks(rows, of_tail)
            coded.append(rows)
        parts = [(coded[0], coded[1])]
        if not through_store and tail.shape[1]:
            parts.append(exact_tail)
        return parts

    def read_parts(self, tokens: int) -> list[States]:
        """The first ``tokens`` tokens as attention reads them, rotated heads ``[B, t, G, D]``: those that
        come from codes, then the others. The layer below is still to be released."""
        parts, start = [], 0
        for states in self._parts(tokens, self.through_store):
            parts.append(self.heads(states, start))
            start += states[0].shape[1]
        return parts

    def _band(self, mask: Tensor | None, queries: int, start: int) -> Tensor:
        """The mask over all tokens as stored, then over the exact ones from ``start`` on: each query
        reads its last ``tail`` tokens exactly and older ones as stored."""
        assert self.tail is not None
        columns = torch.arange(self.tokens, device=self.tail.device)
        age = columns[-queries:, None] - columns[None]
        recent = (age < self.method.tail) & (columns >= start)
        if mask is None:
            mask = (age >= 0)[None, None]
        closed = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        older = mask.masked_fill(recent, closed)
        newer = mask.masked_fill(~recent, closed)[..., start:]
        return torch.cat([older, newer], -1)

    # -- transformers' contract of a layer -----------------------------------------------------

    def get_seq_length(self) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return -1

    @property
    def is_initialized(self) -> bool:
        return self.tail is not None

    @property
    def held_dtype(self) -> torch.dtype:
        assert self.tail is not None
        return self.tail.dtype

    def batch_select_indices(self, indices: Tensor) -> None:
        self.select(indices)

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.tail is not None:
            self.select(torch.arange(self.tail.shape[0], device="cpu").repeat_interleave(repeats))

    # -- parts of it that do not apply ---------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise ValueError("a compressed layer is filled by forward passes only")

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> States:
        raise ValueError("use the cache's own update(): a layer alone does not see the layer input")

    def offload(self) -> None:
        raise ValueError("offloading is not supported by compressed layers")

    prefetch = offload


def _join(parts: list[States]) -> States:
    """Parts of a context, ``[B, t, G, D]`` each, as the attention function takes them, ``[B, G, T, D]``."""
    keys, values = (torch.cat(part, 1) if len(part) > 1 else part[0] for part in zip(*parts, strict=True))
    return keys.transpose(1, 2), values.transpose(1, 2)
