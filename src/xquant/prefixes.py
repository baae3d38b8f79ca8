"""PrefixStore: compressed caches of prompts on disk, found by the tokens with which a new prompt begins."""

import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from . import compat
from .cache.growing import KVCache
from .calibration import Calibration
from .contents import others
from .contents.convert import fill_apart
from .methods import LayerCodec, Method
from .quant.states import BITS, EVERY
from .saved import bases, chunks
from .saved.prefix_names import PrefixNames, is_checkpoint
from .saved.shelf import Shelf
from .saved.writing import as_ids, ids_of, plain_name
from .seam.hooks import attach
from .sizes import in_bytes
from .spec import parse_method

CHUNK = 128
"""Tokens of a chunk, or the next multiple of a method's blocks."""
PART = 1024
"""Tokens that are read in one forward pass, at most."""
_FORMAT = 5
"""Chunks of another format have other names."""


class PrefixStore:
    """A folder of prefixes of prompts, stored by one method for one model.

    Tokens are stored in chunks of 128. The name of a chunk is a hash of all tokens up to its end, so prompts
    that begin alike share chunks, and what is found is right for the prompt. Whole chunks alone are stored:
    the caller's model reads what follows them. Methods and models may share a folder, and its limit; their
    chunks do not mix. Threads and processes may use one folder at the same time, and any of them may be
    killed at any moment.

    A model may have layers that are not compressed: sliding windows and linear attention. What these held at
    the end of a prefix cannot be told later, so it is stored when a cache is `put`, and a prompt is found as
    far as the last such *checkpoint* within it. `prefill` reads a prompt so that there are some on the way.

    Args:
        path: the folder; made where it is missing.
        model: as of `KVCache`.
        method: how prefixes are stored.
        limit: bytes that the folder may take, or a text such as ``"5GB"``; chunks that were not used for
            longest are dropped first, and of a prompt the last ones. By default 20 GB, or half of what the
            disk has for the folder, if that is less.
        calibration: as of `KVCache`, for ``method``.
        state_bits: 32, 16 or 8, at most, of each number in the layers that are not compressed. With 16,
            numbers of 16 bits stay as they are, and of longer ones a row has a scale; 8 is half of it and
            loses some.

    Raises:
        ValueError: as of `KVCache`; a limit that is no size; a model of which prefixes cannot be stored;
            other ``state_bits``.
        OSError: the folder, or the calibration's file, cannot be used.

    Examples:
        >>> from xquant import KVCache, PrefixStore
        >>> store = PrefixStore("prefixes", model, "kivi-2bit", limit="1GB")
        >>> store.get(prompt.input_ids) is None
        True
        >>> cache = KVCache(model, "kivi-4bit")
        >>> _ = model(**prompt, cache=cache)
        >>> store.put(cache, prompt.input_ids)
        [256]
        >>> store.get(prompt.input_ids, "int8").get_seq_length()
        256
    """

    def __init__(
        self,
        path: str | PathLike[str],
        model: nn.Module,
        method: str | Method = "tc-cl-2bit",
        limit: int | str | None = None,
        calibration: Calibration | str | PathLike[str] | None = None,
        state_bits: int = 16,
    ) -> None:
        if state_bits not in BITS:
            raise ValueError(f"state_bits is one of {', '.join(map(str, BITS))}, not {state_bits!r}")
        if isinstance(calibration, str | PathLike):
            calibration = Calibration.load(calibration)
        self.method = parse_method(method)
        self._model, self._calibration = model, calibration
        cache = self._new_cache()
        self._mixed = _keeps_more(cache)
        self._state_bits = state_bits
        self._blocks = -(-CHUNK // self.method.group)
        self._shelf = Shelf(Path(path), None if limit is None else in_bytes(limit))

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return self._blocks * self.method.group

    @property
    def nbytes(self) -> int:
        """Bytes of the folder."""
        return self._shelf.nbytes

    def clear(self) -> None:
        """Remove all that the folder holds, of other models and methods, too.

        Raises:
            OSError: it cannot be removed.
        """
        self._shelf.clear()

    @torch.inference_mode(False)
    @torch.no_grad()
    def put(self, cache: KVCache, tokens: Tensor) -> list[int]:
        """Store the prefixes of all sequences of a cache. It stays as it is.

        A cache of the store's method is stored as it is packed; one of another is decoded and packed anew,
        with the error that it has. Padding is left out.

        Args:
            cache: of the same model, between two forward passes.
            tokens: ids ``[B, T]`` of the tokens that it holds, padding included.

        Returns:
            of each sequence, how many of its first tokens are stored now: fewer than it has where the limit
            is reached, or, with a warning, where the folder cannot be written to.

        Raises:
            ValueError: a cache of another model, tokens other than it holds, or a cache that cannot be
                stored: one with positions of its own, with padding in a sliding window, or, where the store's
                method keeps layer inputs, one of another method or with padding.
            TypeError: no `KVCache`, or no ids.
        """
        if not isinstance(cache, KVCache):
            raise TypeError(f"a KVCache is needed, not {type(cache).__name__}")
        if cache.attachment is not attach(self._model):
            raise ValueError("the cache is one of another model than the store's")
        cache.snapshot()  # undoes a forward pass that was interrupted
        ids = ids_of(cache.contents, tokens)
        _check_usual(cache)
        long = any(long for _, long in cache.index.rope_spans)
        sequences = [ids[i][cache.index.real[i].cpu()] for i in range(len(ids))]
        names = [self._names(own, long) for own in sequences]
        as_it_is, there = self._packs_alike(cache), self._checkpoints()
        stored = [0] * len(ids)
        apart: dict[int, KVCache] = {}
        for i, own in enumerate(names):
            chain = next(own.chains(there), []) if self._mixed else own.chunks
            if own.length(chain) == own.most and all(name in self._shelf for name in chain):
                self._touch(own, chain)
                stored[i] = own.most
            elif as_it_is and _are_of(cache, i, sequences[i]):
                stored[i] = self._put(cache, i, own)
            else:
                apart[i] = self._new_cache()
        if apart:
            fill_apart({i: own.contents for i, own in apart.items()}, cache.contents, ids)
        for i, other in apart.items():
            stored[i] = self._put(other, 0, names[i])
        return stored

    def _put(self, cache: KVCache, sequence: int, names: PrefixNames) -> int:
        """Tokens of one sequence that are stored and can be found."""
        blocks, contents = self._blocks, cache.contents
        bases_held = chunks.bases_of(contents)
        whole = chunks.whole_chunks(contents, blocks)
        chain = names.chunks[:whole]
        if self._mixed:
            chain.append(names.checkpoint(names.most, whole))

        def made(number: int) -> chunks.Chunk:
            if number < whole:
                return chunks.chunk_of(contents, sequence, number, blocks, bases_held)
            return chunks.checkpoint_of(contents, sequence, blocks, bases_held, self._state_bits)

        count = self._shelf.put(chain, made)
        if self._mixed and count < len(chain):
            return names.length(next(names.chains(self._checkpoints()), []))
        self._touch(names, chain[:count])
        return names.length(chain[:count])

    def _touch(self, names: PrefixNames, chain: Sequence[str]) -> None:
        """Note that a chain was used, and what lies on the way: a prompt loses its end first."""
        self._shelf.touch(names.way(chain, self._checkpoints()))

    def prefill(
        self,
        tokens: Tensor | Sequence[int],
        every: int = EVERY,
        method: str | Method | None = None,
        calibration: Calibration | str | PathLike[str] | None = None,
        kernel: str = "auto",
    ) -> KVCache:
        """A cache of all tokens of a prompt but the last, for ``model.generate(tokens, cache=cache)``.

        It begins with what is stored. The model reads the rest, which is stored after every ``every`` tokens
        and at the end: of a model with checkpoints, there is one at each of these places.

        Args:
            tokens: ids of one prompt of two tokens or more, ``[T]`` or ``[1, T]``, without padding.
            every: the fewer, the more bytes are stored, and the further a prompt that begins alike is found.
            method, calibration, kernel: as of `get`; tokens are read with the store's method.

        Raises:
            ValueError: ``every`` below 1; fewer than two tokens; otherwise as of `get` and `put`.
            OSError: a calibration's file cannot be read.
        """
        ids = self._of_one(tokens)
        if every < 1 or len(ids) < 2:
            raise ValueError(f"{len(ids)} tokens, stored every {every}: 2 tokens and every 1 are the least")
        cache = self.get(ids)
        if cache is None:
            cache = self._new_cache(kernel)
        home = attach(self._model).view.compressed[0].device
        while (start := cache.get_seq_length()) < len(ids) - 1:
            stop = min(start // every * every + every, start + PART, len(ids) - 1)
            with torch.no_grad():
                given = {compat.CACHE: cache, "use_cache": True, "logits_to_keep": 1}
                self._model(ids[None, start:stop].to(home), **given)
            if stop % every == 0 or stop == len(ids) - 1:
                self.put(cache, ids[None, :stop])
        wanted = self.method if method is None else parse_method(method)
        return cache if wanted == self.method else cache.converted(wanted, calibration, kernel)

    @torch.inference_mode(False)
    @torch.no_grad()
    def get(
        self,
        tokens: Tensor | Sequence[int],
        method: str | Method | None = None,
        calibration: Calibration | str | PathLike[str] | None = None,
        kernel: str = "auto",
    ) -> KVCache | None:
        """A cache of the longest stored prefix of a prompt, which leaves at least one token to be read.

        ``model.generate(tokens, cache=cache)`` goes on from it with the whole prompt.
        The other arguments are those of `KVCache`; the method is the store's by default.

        Args:
            tokens: ids of one prompt, ``[T]`` or ``[1, T]``, without padding.

        Returns:
            None where no chunk of the prompt is stored, or, with a warning, the folder cannot be read.

        Raises:
            ValueError: more than one prompt; as of `KVCache.converted`.
            OSError: a calibration's file cannot be read.
        """
        ids = self._of_one(tokens)
        wanted = self.method if method is None else parse_method(method)
        same = wanted == self.method
        view = attach(self._model).view
        home = view.compressed[0].device
        long = view.rope.is_long(torch.arange(len(ids), device=home)[None])
        cache = self._longest(self._names(ids[:-1], long), long, ids, kernel if same else "auto")
        if cache is None or same:
            return cache
        return cache.converted(wanted, calibration, kernel)

    @staticmethod
    def _of_one(tokens: Tensor | Sequence[int]) -> Tensor:
        """Ids ``[T]`` of one prompt."""
        ids = as_ids(tokens).cpu()
        ids = ids[0] if ids.dim() == 2 and len(ids) == 1 else ids
        if ids.dim() != 1 or ids.is_floating_point():
            raise ValueError(f"the ids of one prompt are needed, not {list(ids.shape)}")
        return ids

    def _longest(self, names: PrefixNames, long: bool, ids: Tensor, kernel: str) -> KVCache | None:
        """A cache of as many of the first tokens as are stored and whole."""
        chains = names.chains(self._checkpoints()) if self._mixed else [names.chunks]
        for chain in chains:
            least = len(chain) if self._mixed else 1
            found = list[chunks.Chunk]()
            for name in chain:
                chunk = self._shelf.get(name)
                if chunk is None:
                    break
                found.append(chunk)
            while len(found) >= least > 0:
                cache = self._new_cache(kernel)
                try:
                    chunks.fill(cache.contents, found, self._blocks, long, ids)
                except chunks.DamagedChunkError as error:
                    self._shelf.discard(chain[error.number], str(error))
                    del found[error.number :]
                    continue
                self._touch(names, chain[: len(found)])
                return cache
        return None

    def _checkpoints(self) -> set[str]:
        """The names of all checkpoints in the folder, those of other prompts and models among them."""
        return {name for name in self._shelf.names() if is_checkpoint(name)} if self._mixed else set()

    def _new_cache(self, kernel: str = "auto") -> KVCache:
        return KVCache(self._model, self.method, calibration=self._calibration, kernel=kernel)

    @property
    def _codecs(self) -> list[LayerCodec]:
        return attach(self._model).codecs.of(self.method, self._calibration)

    def _names(self, tokens: Tensor, long: bool) -> PrefixNames:
        """Of a sequence ``[T]``.

        Args:
            long: whether the model applies RoPE with the frequencies that it has for long inputs.
        """
        first, digests = self._codecs[0], attach(self._model).identity.now()
        dtype = plain_name(first.view.dtype)
        stored = [_FORMAT, *digests, dtype, self.method.spec, first.calibrated, long]
        if self._mixed:
            stored.append(self._state_bits)
        return PrefixNames(json.dumps(stored).encode(), tokens, self.chunk, self._mixed)

    def _packs_alike(self, cache: KVCache) -> bool:
        """Whether a cache holds blocks as the store does."""
        if cache.method != self.method:
            return False
        ours, theirs = self._codecs, cache.stack.codecs
        probes = (bases.probe(self.method, codecs) for codecs in (ours, theirs))
        return ours[0].calibrated == theirs[0].calibrated and bases.same(*probes)


def _keeps_more(cache: KVCache) -> bool:
    """Whether a model has layers that are not compressed. Models of which a prefix is not known by its blocks
    and these are refused."""
    view, empty = cache.attachment.view, cache.contents
    family = type(view.model).__name__
    if view.rope.drifts:
        raise ValueError(
            f"prefixes of {family} cannot be stored: it turns keys by other angles for every length"
        )
    for number, layer in empty.others.items():
        if why := others.unknown(layer):
            raise ValueError(f"prefixes of {family} cannot be stored: layer {number} is kept in {why}")
    return bool(empty.linear_states) or not all(map(compat.is_empty, empty.others.values()))


def _are_of(cache: KVCache, sequence: int, ids: Tensor) -> bool:
    """Whether a sequence holds the tokens of these ids and no padding, and its codes are what they would be
    with these ids."""
    if cache.stack.codecs[0].embedding is not None:
        return torch.equal(cache.index.ids[sequence].cpu(), ids)
    return len(ids) == cache.index.length


def _check_usual(cache: KVCache) -> None:
    """Refuse tokens that are not at positions 0, 1, 2 and so on, with one set of frequencies."""
    index = cache.index
    expected = index.real.cumsum(1) - 1
    usual = bool(((index.positions == expected) | ~index.real).all())
    if index.axes is not None or not index.uniform or not usual:
        raise ValueError(
            "prefixes of this cache cannot be stored: its tokens have positions of their own, or of images"
        )
