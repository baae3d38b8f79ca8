"""RestingCache: how a cache is saved to a file and loaded, converted to another method, and pickled."""

import copy
import tempfile
from abc import abstractmethod
from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import Cache

from ..calibration import Calibration
from ..contents.contents import Contents
from ..contents.convert import fill
from ..contents.options import CacheOptions
from ..methods import Method
from ..seam.hooks import Attachment, attached
from ..seam.passes import is_running
from ..spec import parse_method
from . import reading, writing
from .header import opened


class RestingCache(Cache):
    """The part of `KVCache` that saves, loads and converts."""

    attachment: Attachment
    options: CacheOptions
    _begun: Any

    saved_tokens: Tensor | None

    @property
    @abstractmethod
    def contents(self) -> Contents:
        """What the cache holds."""

    @abstractmethod
    def _undo(self) -> None:
        """Undo a forward pass that was interrupted."""

    @abstractmethod
    def _make_room(self, batch: int, new: int, others: Contents) -> None:
        """Decide how many tokens stay in full, once there are ``new`` more of each sequence of a ``batch``,
        beside layers that are not compressed, as these contents have them."""

    @abstractmethod
    def _refresh(self) -> None:
        """Build an empty cache anew where the model has changed."""

    def converted(
        self,
        method: str | Method,
        calibration: Calibration | str | PathLike[str] | None = None,
        kernel: str = "auto",
    ) -> Self:
        """A new cache of the same model that holds the same past, stored by another method.

        This cache stays as it is. Compressed tokens are decoded and stored as if they had come in one
        forward pass, with ``attend`` and ``budget`` as here; sinks and the tail are exact. With the same
        method, the result is a copy of codes and kernels. Arguments are those of `KVCache`.

        Raises:
            ValueError: as of `KVCache`, and for methods that keep layer inputs (``xquant``, ``xquant-cl``).

        Examples:
            >>> small = KVCache(model, "kivi-2bit")
            >>> _ = model(**prompt, cache=small)
            >>> small.converted("int8").get_seq_length()
            300
        """
        method = parse_method(method)
        if method == self.options.method:
            return copy.deepcopy(self)
        self._undo()
        own, model = self.options, self.attachment.view.model
        other = type(self)(model, method, own.attend, calibration, kernel, own.offload, own.budget)
        other._refresh()
        other._make_room(self.contents.index.batch, self.contents.index.length, self.contents)
        fill(other.contents, self.contents)
        other.saved_tokens = self.saved_tokens
        return other

    def save(
        self,
        path: str | PathLike[str],
        tokens: Tensor | None = None,
        pack: str | None = None,
    ) -> None:
        """Write the cache to a file, which appears whole or not at all.

        The file holds what is resident, packed as it is, and says what it was made from. `load` gives back a
        cache that goes on with the same tokens. What a calibration holds is not stored again: keep its file.

        Args:
            path: of a safetensors file.
            tokens: ids ``[B, T]`` of the tokens that the cache holds, which `load` gives back as
                `saved_tokens`: ``model.generate`` wants them before those that follow.
            pack: ``"entropy"`` makes the file smaller without loss. It needs the package zstandard.

        Raises:
            ValueError: called within a forward pass; ids of other tokens; a path that is no file; layers
                of a kind whose state is not known; NaN that an earlier forward pass on a GPU left.
            ModuleNotFoundError: zstandard is asked for and not installed.
            OSError: the file cannot be written.
        """
        if self._begun is not None and is_running(self.attachment.view.decoder):
            raise ValueError("a cache cannot be saved within a forward pass: save it before or after")
        self._undo()
        writing.write(self.contents, Path(path), tokens, pack)

    @classmethod
    @torch.inference_mode(False)  # what is made within it could not be written to outside
    @torch.no_grad()
    def load(
        cls,
        model: nn.Module,
        path: str | PathLike[str],
        calibration: Calibration | str | PathLike[str] | None = None,
        kernel: str = "auto",
        offload: str | None = None,
        budget: int | str | None = None,
    ) -> Self:
        """The cache that `save` wrote, for the same model: method and ``attend`` are those that it had.

        Args:
            model: with the configuration, the weights and adapters, and in the dtype, of the one that the
                cache was saved from.
            calibration, kernel, offload, budget: as of `KVCache`; the calibration is the one that the cache
                was made with.

        Raises:
            ValueError: a file that is damaged, cut short, of another format or no saved cache; another
                model or calibration; further errors as of `KVCache`.
            OSError: the file cannot be read.
        """
        with attached(model) as attachment, opened(Path(path)) as saved:
            reading.check_model(saved, attachment)
            header = saved.header
            cache = cls(model, header.method, header.attend, calibration, kernel, offload, budget)
            cache._refresh()
            cache.saved_tokens = reading.fill(cache.contents, saved)
        return cache

    def reuse(self, tokens: Tensor) -> int:
        """Keep the tokens with which a prompt begins, of a cache that was loaded with its ids, and drop those
        after them. ``model.generate(tokens, cache=cache)`` then reads the rest of the prompt, whatever it is.

        Where the cache holds one sequence and ``tokens`` several, each begins with it, and they share its
        blocks. Where a sliding window or linear attention cannot go back so far, nothing is kept.

        Args:
            tokens: ids ``[B, T]`` of the whole prompt, without padding.

        Returns:
            tokens of each sequence that are kept: at most ``T - 1``, so that one is left to be read.

        Raises:
            ValueError: the cache has no `saved_tokens`, or those of another number of sequences.

        Examples:
            >>> from xquant import KVCache
            >>> cache = KVCache(model, "kivi-4bit")
            >>> _ = model(**prompt, cache=cache)
            >>> cache.save("prompt.cache", tokens=prompt.input_ids)
            >>> loaded = KVCache.load(model, "prompt.cache")
            >>> loaded.reuse(prompt.input_ids[:, :200])
            199
        """
        held = self.saved_tokens
        if held is None:
            raise ValueError("the ids of what this cache holds are not known: save it with tokens=")
        ids = writing.as_ids(tokens).cpu()
        if ids.dim() != 2 or len(held) not in (1, len(ids)):
            raise ValueError(f"this cache holds {len(held)} sequences, and the ids are {list(ids.shape)}")
        most = min(held.shape[1], ids.shape[1] - 1)
        same = (held[:, :most] == ids[:, :most]).all(0)
        keep = int(same.cumprod(0).sum())
        try:
            if 0 < keep < self.get_seq_length():
                self.crop(keep - self.get_seq_length())
        except RuntimeError:  # transformers' own layers do not go back past their window
            keep = 0
        if not keep:
            self.reset()
        if keep and len(held) < len(ids):
            self.batch_repeat_interleave(len(ids))
        return keep

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the bytes that `save` writes. The cache itself holds its model, which would be pickled,
        too."""
        with tempfile.TemporaryDirectory() as folder:
            self.save(Path(folder) / "cache")
            return SavedCache, (type(self), (Path(folder) / "cache").read_bytes())

    def __copy__(self) -> Self:
        return copy.deepcopy(self)


class SavedCache:
    """What comes of a `KVCache` that was pickled, as by ``torch.save``: the bytes that `KVCache.save` writes.

    Examples:
        >>> import pickle
        >>> from xquant import KVCache
        >>> cache = KVCache(model, "kivi-4bit")
        >>> _ = model(**inputs, cache=cache)
        >>> saved = pickle.loads(pickle.dumps(cache))
        >>> saved.load(model).get_seq_length() == cache.get_seq_length()
        True
    """

    def __init__(self, kind: type[RestingCache], content: bytes) -> None:
        self._kind = kind
        self.content = content
        """A saved cache, see docs/format.md."""

    def load(
        self,
        model: nn.Module,
        calibration: Calibration | str | PathLike[str] | None = None,
        kernel: str = "auto",
        offload: str | None = None,
        budget: int | str | None = None,
    ) -> RestingCache:
        """The cache. Arguments and errors are those of `KVCache.load`."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "cache"
            file.write_bytes(self.content)
            return self._kind.load(model, file, calibration, kernel, offload, budget)
