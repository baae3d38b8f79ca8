"""PrefixStore: compressed caches of prompts on disk, found by the tokens with which a new prompt begins."""

import hashlib
import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from . import compat
from .cache.growing import KVCache
from .calibration import Calibration
from .contents.convert import fill_apart
from .methods import LayerCodec, Method
from .saved import bases, chunks
from .saved.shelf import Shelf
from .saved.writing import as_ids, ids_of, plain_name
from .seam.hooks import attach
from .sizes import in_bytes
from .spec import parse_method

CHUNK = 128
"""Tokens of a chunk, or the next multiple of a method's blocks."""
_FORMAT = 5
"""Chunks of another format have other names."""


class PrefixStore:
    """A folder of prefixes of prompts, stored by one method for one model.

    Tokens are stored in chunks of 128. The name of a chunk is a hash of all tokens up to its end, so prompts
    that begin alike share chunks, and what is found is right for the prompt. Whole chunks alone are stored:
    the caller's model reads what follows them. Methods and models may share a folder, and its limit; their
    chunks do not mix. Threads and processes may use one folder at the same time, and any of them may be
    killed at any moment.

    Args:
        path: the folder; made where it is missing.
        model: as of `KVCache`. All of its layers must be compressed: the state that a sliding window or
            linear attention had at the end of a prefix is not known afterwards.
        method: how prefixes are stored.
        limit: bytes that the folder may take, or a text such as ``"20GB"``; chunks that were not used for
            longest are dropped first, and of a prompt the last ones.
        calibration: as of `KVCache`, for ``method``.

    Raises:
        ValueError: as of `KVCache`; a limit that is no size; a model of which prefixes cannot be stored.
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
        limit: int | str = "20GB",
        calibration: Calibration | str | PathLike[str] | None = None,
    ) -> None:
        if isinstance(calibration, str | PathLike):
            calibration = Calibration.load(calibration)
        self.method = parse_method(method)
        self._model, self._calibration = model, calibration
        cache = self._new_cache()
        _check_whole(cache)
        self._blocks = -(-CHUNK // self.method.group)
        self._shelf = Shelf(Path(path), in_bytes(limit))

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return self._blocks * self.method.group

    @property
    def nbytes(self) -> int:
        """Bytes of the folder."""
        return self._shelf.nbytes

    def clear(self) -> None:
        """Remove all that the folder holds, of other models and methods, too."""
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
            of each sequence, how many of its first tokens are stored now.

        Raises:
            ValueError: a cache of another model, tokens other than it holds, or a cache that cannot be
                stored: one with positions of its own, or, where the store's method keeps layer inputs, one of
                another method or with padding.
            TypeError: no `KVCache`, or no ids.
            OSError: the folder cannot be written to.
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
        names = self._names(sequences, long)
        as_it_is = self._packs_alike(cache)
        stored = [0] * len(ids)
        apart: dict[int, KVCache] = {}
        for i, own in enumerate(names):
            if all(name in self._shelf for name in own):
                self._shelf.touch(own)
                stored[i] = self.chunk * len(own)
            elif as_it_is and _are_of(cache, i, sequences[i]):
                whole = chunks.whole_chunks(cache.contents, self._blocks)
                stored[i] = self._put(cache, i, own[:whole])
            else:
                apart[i] = self._new_cache()
        if apart:
            fill_apart({i: own.contents for i, own in apart.items()}, cache.contents, ids)
        for i, other in apart.items():
            whole = chunks.whole_chunks(other.contents, self._blocks)
            stored[i] = self._put(other, 0, names[i][:whole])
        return stored

    def _put(self, cache: KVCache, sequence: int, names: Sequence[str]) -> int:
        """Tokens of the chunks that are stored of one sequence."""
        blocks, contents = self._blocks, cache.contents
        bases_held = chunks.bases_of(contents)
        return self.chunk * self._shelf.put(
            names, lambda number: chunks.chunk_of(contents, sequence, number, blocks, bases_held)
        )

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
            None where no chunk of the prompt is stored.

        Raises:
            ValueError: more than one prompt; as of `KVCache.converted`.
            OSError: the folder cannot be read.
        """
        ids = as_ids(tokens).cpu()
        ids = ids[0] if ids.dim() == 2 and len(ids) == 1 else ids
        if ids.dim() != 1 or ids.is_floating_point():
            raise ValueError(f"the ids of one prompt are needed, not {list(ids.shape)}")
        wanted = self.method if method is None else parse_method(method)
        same = wanted == self.method
        view = attach(self._model).view
        home = view.compressed[0].device
        long = view.rope.is_long(torch.arange(len(ids), device=home)[None])
        (names,) = self._names([ids[:-1]], long)
        cache = self._longest(names, long, ids, kernel if same else "auto")
        if cache is None or same:
            return cache
        return cache.converted(wanted, calibration, kernel)

    def _longest(self, names: Sequence[str], long: bool, ids: Tensor, kernel: str) -> KVCache | None:
        """A cache of the chunks of these names, as many from the first on as are stored and whole."""
        found = list[chunks.Chunk]()
        for name in names:
            chunk = self._shelf.get(name)
            if chunk is None:
                break
            found.append(chunk)
        while found:
            cache = self._new_cache(kernel)
            try:
                chunks.fill(cache.contents, found, self._blocks, long, ids)
            except chunks.DamagedChunkError as error:
                self._shelf.discard(names[error.number], str(error))
                del found[error.number :]
                continue
            self._shelf.touch(names[: len(found)])
            return cache
        return None

    def _new_cache(self, kernel: str = "auto") -> KVCache:
        return KVCache(self._model, self.method, calibration=self._calibration, kernel=kernel)

    @property
    def _codecs(self) -> list[LayerCodec]:
        return attach(self._model).codecs.of(self.method, self._calibration)

    def _names(self, sequences: Sequence[Tensor], long: bool) -> list[list[str]]:
        """Of each whole chunk of sequences ``[T]`` a hash of all tokens up to its end, of the model and how
        it is stored.

        Args:
            long: whether the model applies RoPE with the frequencies that it has for long inputs.
        """
        first, digests = self._codecs[0], attach(self._model).identity.now()
        dtype = plain_name(first.view.dtype)
        stored = [_FORMAT, *digests, dtype, self.method.spec, first.calibrated, long]
        root, names = json.dumps(stored).encode(), list[list[str]]()
        for tokens in sequences:
            digest, own = root, list[str]()
            for chunk in tokens[: len(tokens) // self.chunk * self.chunk].split(self.chunk):
                digest = hashlib.sha256(digest + chunk.numpy().astype("<i8").tobytes()).digest()
                own.append(digest.hex())
            names.append(own)
        return names

    def _packs_alike(self, cache: KVCache) -> bool:
        """Whether a cache holds blocks as the store does."""
        if cache.method != self.method:
            return False
        ours, theirs = self._codecs, cache.stack.codecs
        probes = (bases.probe(self.method, codecs) for codecs in (ours, theirs))
        return ours[0].calibrated == theirs[0].calibrated and bases.same(*probes)


def _check_whole(cache: KVCache) -> None:
    """Refuse models of which a prefix is not in the blocks of compressed layers alone."""
    view = cache.attachment.view
    family = type(view.model).__name__
    if view.rope.drifts:
        raise ValueError(
            f"prefixes of {family} cannot be stored: it turns keys by other angles for every length"
        )
    if cache.linear_states or not all(compat.is_empty(cache.layers[index]) for index in view.skipped):
        raise ValueError(
            f"prefixes of {family} cannot be stored: some of its layers are not compressed, and their state"
            " at the end of a prefix is not known"
        )


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
