"""LayerStack: the compressed layers of one cache, what they share, and what attends over each."""

import copy
import math
from typing import Any

from torch import Tensor

from ..analysis.memory import ENTRY_NBYTES, INDEX_NBYTES
from ..kernels.backend import LayerAttention, Shared
from ..kernels.call import AttentionCall
from ..kernels.choose import Choice, choose, packer_of
from ..kernels.rope import RopeTable
from ..kernels.trial import Trial
from ..kernels.workspace import Workspace
from ..methods import LayerCodec
from ..models.rope import Rope
from ..past.growing import State as LayerState
from ..past.growing_layer import CompressedLayer
from ..past.offload import Offloader
from ..past.sealing import seal
from ..past.sequences import MOST_QUERIES
from ..past.tokens import TokenIndex
from ..quant.quantizer import as_written
from .options import CacheOptions

_WIDEST = 4
"""Bytes of a number of a sink, at most."""


class LayerStack:
    """The compressed layers, bottom up, empty at first.

    Args:
        codecs: of the layers, bottom up.
        options: of the cache, whose method gave the codecs.
        rope: of the model.

    Raises:
        ValueError: a kernel that cannot be used.
    """

    def __init__(
        self,
        codecs: list[LayerCodec],
        options: CacheOptions,
        rope: Rope,
    ) -> None:
        self.codecs, self._options = codecs, options
        method, through_store, kernel = options.method, options.through_store, options.kernel
        self.index = TokenIndex(method.sink, rope, codecs[0].embedding)
        trial = Trial(codecs, method, rope)
        self.choices: dict[int, Choice] = {
            codec.view.index: choose(codec, method.group, kernel, through_store, trial) for codec in codecs
        }
        """Which backend attends over a layer, by the layer's number in the model."""
        devices = {codec.view.device for codec in codecs}
        packers = {device: packer_of(kernel, device) for device in devices}
        below = None
        self.layers: list[CompressedLayer] = []
        for codec in codecs:
            packer = packers[codec.view.device]
            below = CompressedLayer(codec, method, self.index, through_store, below, packer)
            self.layers.append(below)
        CompressedLayer.link(self.layers)
        self.offloader = self._offloader() if options.offload else None
        self._unsealed: list[LayerState] | None = None
        self._attach_backends()

    def _offloader(self) -> Offloader:
        return Offloader(
            [layer.stream for layer in self.layers], [codec.view.device for codec in self.codecs]
        )

    def _attach_backends(self) -> None:
        self.shared = Shared(RopeTable(self.index), Workspace())
        self._attentions: dict[int, LayerAttention] = {}
        for layer in self.layers:
            number = layer.codec.view.index
            backend = self.choices[number].backend
            layer.accumulator = backend.accumulator(layer)
            self._attentions[number] = backend.attention(layer, self.shared)

    def __deepcopy__(self, memo: dict[int, Any]) -> "LayerStack":
        """Layers with the same tokens. What attends over them holds their addresses, so it is made anew."""
        memo.update((id(codec), codec) for codec in self.codecs)
        other = memo[id(self)] = object.__new__(type(self))
        other.codecs, other.choices, other._options = self.codecs, self.choices, self._options
        other.index = copy.deepcopy(self.index, memo)
        memo[id(self.offloader)] = None
        other.layers = copy.deepcopy(self.layers, memo)
        other.offloader = None if self.offloader is None else other._offloader()
        other._unsealed = None  # see `forget_unsealed`
        other._attach_backends()
        return other

    def enter(self, layer: CompressedLayer) -> None:
        """A forward pass has come to this layer."""
        if self.offloader is not None:
            self.offloader.enter(self.layers.index(layer))

    def keep_newest(self, budget: int, batch: int, new: int) -> None:
        """Have as many of the newest tokens stay in full as fit into ``budget`` bytes, once there are ``new``
        more of each sequence of a ``batch``."""
        first, block = self.layers[0], self.layers[0].stream.block
        segments = [segment for layer in self.layers for segment in layer.stream.segments]
        row = sum(codec.tail_width * codec.view.dtype.itemsize for codec in self.codecs)
        packed = sum(sum(segment.parts(block).values()) for segment in segments)
        packed += ENTRY_NBYTES * len(self.layers)
        held = sum(layer.tail_nbytes + layer.sink_nbytes for layer in self.layers) + self.index.nbytes
        held += sum(layer.stream.nbytes + layer.stream.table_nbytes for layer in self.layers)
        if first.sinks is None:  # what comes with the first block
            held += batch * sum(self.index.sinks * codec.width * _WIDEST for codec in self.codecs)
        held += sum(segment.quantizer.table_nbytes for segment in segments)
        over = held + batch * new * (row + INDEX_NBYTES) - budget
        saved = batch * (row * block - packed)
        blocks = math.ceil(over / saved) if over > 0 and saved > 0 else 0
        tail = 0 if first.tail is None else first.tail.shape[1]
        self.index.newest = tail + new - blocks * block

    @property
    def keeps_rotated(self) -> bool:
        """Whether all layers keep keys after RoPE."""
        return all(codec.rotated for codec in self.codecs)

    def attend(self, number: int, call: AttentionCall) -> Tensor | None:
        """Attention of layer ``number`` by its backend; None where the reference must answer, as at
        the beginning of a prompt."""
        attention, queries = self._attentions[number], call.query.shape[2]
        if self.index.length == queries:  # nothing came before
            return None
        with as_written(call.query):
            few = queries <= MOST_QUERIES
            return attention.attend(call) if few or attention.reads_chunks else None

    def complete(self, before: int) -> bool:
        """End a forward pass that began with ``before`` tokens: seal what layers hold for its end. False
        where layers were left out.

        Raises:
            ValueError: NaN or infinity in the hidden states, where they were not asked about before.
        """
        length = self.index.length
        if any(layer.tokens != length for layer in self.layers):
            return False
        due = [layer for layer in self.layers if layer.due]
        if due or length - before > MOST_QUERIES:
            CompressedLayer.check_finite(self.layers, before)
        if due == self.layers and before and 1 < length - before <= MOST_QUERIES:
            self._unsealed = [layer.snapshot() for layer in self.layers]
        seal(due)
        self.index.forget()
        return True

    def unseal(self, length: int) -> None:
        """Have the exact tokens back that the newest forward pass has sealed, where the past is cut to
        ``length`` tokens, which ends among them, and the pass may have been one of drafts."""
        if self._unsealed is None or length >= self.layers[0].stream.tokens:
            return
        for layer, state in zip(self.layers, self._unsealed, strict=True):
            layer.restore(state)
            if cut := layer.tokens - self.index.length:  # by an earlier crop
                layer.crop(-cut)
        self._unsealed = None

    def forget_unsealed(self) -> None:
        """What the newest forward pass has sealed stays so."""
        self._unsealed = None

    @property
    def unsealed_nbytes(self) -> int:
        """Bytes of what `unseal` brings back, beside what layers hold."""
        tails = (state[0] for state in self._unsealed or [])
        return sum(tail.nbytes for tail in tails if tail is not None)

    def forget_pass(self) -> None:
        """Forget what holds for one forward pass only."""
        self.forget_unsealed()
        self.shared.rope.clear()
        self.index.forget()
        for layer in self.layers:
            layer.release()

    def reset(self) -> None:
        """Forget all tokens."""
        for layer in self.layers:
            layer.reset()
        self.forget_unsealed()
        self.index.reset()
