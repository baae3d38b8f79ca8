"""PrefixNames: under what the beginnings of a prompt are stored."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

_MARK = "-"
"""Between the parts of a checkpoint's name."""


class PrefixNames:
    """Of one sequence: of each whole chunk a hash of all tokens up to its end, of the model and how it is
    stored. The name of a checkpoint begins with that of the last whole chunk.

    Args:
        root: model, and how it is stored.
        tokens: ids ``[T]``.
        chunk: tokens of a chunk.
        mixed: whether there are checkpoints.
    """

    def __init__(self, root: bytes, tokens: Tensor, chunk: int, mixed: bool) -> None:
        self._tokens, self._chunk, self._mixed = tokens, chunk, mixed
        self._starts = [hashlib.sha256(root).hexdigest()]
        digest = root
        for own in tokens[: len(tokens) // chunk * chunk].split(chunk):
            digest = _hash(digest, own)
            self._starts.append(digest.hex())

    @property
    def chunks(self) -> list[str]:
        """Of all whole chunks."""
        return self._starts[1:]

    @property
    def most(self) -> int:
        """How many tokens can be found."""
        return len(self._tokens) if self._mixed else self._chunk * len(self.chunks)

    def checkpoint(self, tokens: int, before: int) -> str:
        """Of a checkpoint after so many tokens, with so many chunks before it."""
        whole = tokens // self._chunk
        rest = _hash(bytes.fromhex(self._starts[whole]), self._tokens[whole * self._chunk : tokens])
        return _MARK.join([self._starts[whole], str(tokens), str(before), rest.hex()])

    def chains(self, checkpoints: Iterable[str]) -> Iterator[list[str]]:
        """Chunks and one of these checkpoints that belong together, those of most tokens first."""
        starts, own = set(self._starts), []
        for name in checkpoints:
            start, *numbers = name.split(_MARK)
            if start in starts and len(numbers) == 3 and all(map(str.isdecimal, numbers[:2])):
                tokens, before = map(int, numbers[:2])
                if tokens <= len(self._tokens) and name == self.checkpoint(tokens, before):
                    own.append((tokens, before, name))
        for _, before, name in sorted(own, reverse=True):
            yield [*self.chunks[:before], name]

    def way(self, chain: Sequence[str], checkpoints: Iterable[str]) -> list[str]:
        """A chain and those of these checkpoints that lie on the way to its end, in order of tokens."""
        ends = {name: self._chunk * number for number, name in enumerate(self.chunks, 1) if name in chain}
        ends |= {own[-1]: self.length(own) for own in self.chains(checkpoints)}
        return sorted(
            (name for name in ends if ends[name] <= self.length(chain)), key=lambda name: ends[name]
        )

    def length(self, chain: Sequence[str]) -> int:
        """Tokens of a chain."""
        if not self._mixed or not chain:
            return self._chunk * len(chain)
        return int(chain[-1].split(_MARK)[1])


def is_checkpoint(name: str) -> bool:
    """Whether a name is one of a checkpoint."""
    return _MARK in name


def _hash(start: bytes, tokens: Tensor) -> bytes:
    return hashlib.sha256(start + tokens.numpy().astype("<i8").tobytes()).digest()
