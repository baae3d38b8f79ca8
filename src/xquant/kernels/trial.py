"""Trial: a backend is compared with the reference before ``auto`` takes it, and a packer with torch.

Kernels that a machine compiles for itself may meet a device, or a compiler, that no test has seen. So the
first time that a kernel is to read a layout on a device, it attends over a few blocks of random states in a
real store, and is taken where it gives what the reference gives. That is done once a process for each layout.
Of the blocks that a packer is to pack or unpack first, it packs one in both ways.
"""

import threading
import warnings
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..methods import AttentionInputs, LayerCodec, Method
from ..models import AttentionView
from ..models.rope import Rope
from ..past.angles import Angles
from ..past.batch_layout import BatchLayout
from ..past.growing_layer import CompressedLayer
from ..past.packer import TORCH
from ..past.sequences import MOST_QUERIES
from ..past.static_layer import StaticLayer
from ..past.step import Retention
from ..past.tokens import TokenIndex
from .backend import Backend, Shared
from .call import AttentionCall
from .rope import RopeTable
from .workspace import Workspace

BLOCKS = 2
"""So many are packed, so that one does not begin at position 0."""
TAIL = 5
"""More tokens are kept as they are, the newest among them."""
SEQUENCES = 2
SHOWN = 200
"""Characters of an error that are told of."""

_lock = threading.Lock()
_failures: dict[Hashable, str] = {}
_warned: set[tuple[str, str, torch.device]] = set()


def tolerance(dtype: torch.dtype) -> float:
    """The error of attention (2-norm, relative) up to which a kernel agrees with the reference, which rounds
    to ``dtype``: some roundings of this type, and of halves, in which kernels multiply."""
    return 2e-3 + 4 * torch.finfo(dtype).eps


def failure_of(key: Hashable) -> str | None:
    """What `remembered` has of a key; None before it was tried."""
    with _lock:
        return _failures.get(key)


def remembered(
    key: Hashable,
    name: str,
    compare: Callable[[], str],
    what: str,
    of: str,
    device: torch.device,
) -> str:
    """Why what has this ``name`` is not to be taken, as ``compare`` finds once a process for every ``key``;
    empty where it is. The first failure of a name on a device is a warning, too, that says ``what`` is done
    in torch, and ``of`` what it was tried on."""
    with _lock:
        if key in _failures:
            return _failures[key]
        try:
            failure = compare()
        except Exception as failed:  # whatever a compiler or a driver raises
            said = (str(failed).strip() or "nothing").splitlines()[-1]
            failure = f"{name} failed: {type(failed).__name__}: {said[:SHOWN]}"
        _failures[key] = failure
        if failure and (name, what, device) not in _warned:
            _warned.add((name, what, device))
            on = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
            warnings.warn(
                f"xquant: {failure}, so {what} in torch, which is slower. Please report this line, with the"
                f" versions of xquant and Triton: {of}, {on}, torch {torch.__version__}",
                RuntimeWarning,
                stacklevel=3,
            )
        return failure


class Trial:
    """Compares backends with the reference on the layers of one cache that grows.

    Args:
        codecs: of all its layers, bottom up.
        method: whose codecs they are.
        rope: of the model.
    """

    form = "attention runs"
    """What is tried, for keys and warnings."""

    def __init__(self, codecs: Sequence[LayerCodec], method: Method, rope: Rope) -> None:
        self.codecs, self.method, self.rope = codecs, method, rope

    def failure(self, backend: Backend, codec: LayerCodec) -> str:
        """Why a backend that could read a layer is not to be taken for it; empty where it agrees with the
        reference. The first failure on a device is a warning, too."""
        view = codec.view

        def compare() -> str:
            error = self.error(backend, codec)
            if error <= tolerance(view.dtype):
                return ""
            return f"{backend.name} differs from the reference by {error:.2g}"

        return remembered(
            (backend.name, self.form, self.layout(codec)),
            backend.name,
            compare,
            self.form,
            f"{self.method.spec}, heads of {view.head_size}, {view.dtype}",
            view.device,
        )

    def layout(self, codec: LayerCodec) -> Hashable:
        """What kernels are compiled for, and run on."""
        view, block = codec.view, self.method.group
        operands = (segment.operand(block) for segment in codec.segments)
        return (
            *(type(codec), view.device, view.dtype, block, bool(self.method.sink)),
            *(view.head_size, view.kv_heads, view.query_heads, view.key_norm is None),
            *(codec.rotated, codec.offset is None, self.rope.width),
            *(codec.reads_below, codec.feeds_above),
            *(None if operand is None else operand.layout for operand in operands),
        )

    @torch.no_grad()
    def error(self, backend: Backend, codec: LayerCodec) -> float:
        """The largest error of its attention, relative (2-norm), without and with a mask."""
        view = codec.view
        random = torch.Generator(view.device).manual_seed(0)
        layers = self._filled(codec, random)
        layer = next(one for one in layers if one.codec is codec)

        def states(heads: int) -> Tensor:
            shape = SEQUENCES, heads, 1, view.head_size
            return torch.randn(shape, generator=random, dtype=view.dtype, device=view.device)

        query, key, value = states(view.query_heads), states(view.kv_heads), states(view.kv_heads)
        shape = SEQUENCES, 1, 1, layer.tokens
        mask = torch.rand(shape, generator=random, device=view.device, dtype=torch.float32) > 0.2
        mask[..., -1] = True
        scaling = view.head_size**-0.5
        calls = [AttentionCall(query, key, value, each, scaling, None) for each in (None, mask)]
        expected = [_reference(call, *layer.read(key, value, call.mask)) for call in calls]
        shared = Shared(RopeTable(layer.index), Workspace())
        for one in layers:
            one.release()
            one.accumulator = backend.accumulator(one)
        attention, errors = backend.attention(layer, shared), []
        for call, right in zip(calls, expected, strict=True):
            for one in layers:
                one.accumulate()
            found = attention.attend(call)
            if found is None:
                raise ValueError("it has no answer")
            errors.append(float((found.double() - right).norm() / right.norm()))
        return max(errors, key=lambda error: (error != error, error))  # NaN is the worst

    def _filled(self, codec: LayerCodec, random: torch.Generator) -> list[CompressedLayer]:
        """Layers with random tokens: of ``codec`` alone, or of all where layers need others."""
        shares = any(segment.shared for segment in codec.segments)
        alone = codec.span == 1 and not (codec.reads_below or codec.feeds_above or shares)
        codecs = [codec] if alone else self.codecs
        index = TokenIndex(self.method.sink, self.rope, codecs[0].embedding)
        layers: list[CompressedLayer] = []
        for one in codecs:
            below = layers[-1] if layers else None
            layers.append(CompressedLayer(one, self.method, index, False, below, TORCH))
        CompressedLayer.link(layers)
        sealed = self.method.tail + BLOCKS * self.method.group
        for start, stop in ((0, sealed), (sealed, sealed + TAIL)):
            device = codecs[0].view.device
            positions = torch.arange(start, stop, device=device).expand(SEQUENCES, -1)
            index.append(positions, torch.ones_like(positions, dtype=torch.bool))
            for layer in layers:
                layer.append(random_states(layer.codec.view, SEQUENCES, stop - start, random))
        return layers


def tried_room(method: Method) -> int:
    """Tokens of a sequence in a trial."""
    return method.tail + BLOCKS * method.group + TAIL + 1


class PagesTrial(Trial):
    """Compares what reads the pages of a layer with torch.

    Args:
        angles: of the rotary embedding, for codecs that keep keys before it.
    """

    form = "pages are read"

    def __init__(
        self, codecs: Sequence[LayerCodec], method: Method, rope: Rope, angles: Angles | None
    ) -> None:
        super().__init__(codecs, method, rope)
        self._angles = angles

    @torch.no_grad()
    def error(self, backend: Backend, codec: LayerCodec) -> float:
        """Of attention in a decode step, relative (2-norm); 0 where the backend reads no such pages."""
        view, room = codec.view, tried_room(self.method)
        angles = None if codec.rotated else self._angles
        layer = StaticLayer(codec, self.method, room, angles, backend, TORCH)
        if not layer.in_place:
            return 0.0
        random = torch.Generator(view.device).manual_seed(0)
        layout = BatchLayout(SEQUENCES, room, Retention.of(self.method, MOST_QUERIES), view.device)
        layer.reserve(layout, view.dtype)

        def states(count: int) -> tuple[Tensor, Tensor]:
            layout.begin(torch.ones(SEQUENCES, count, dtype=torch.bool, device="cpu"))
            found = random_states(view, SEQUENCES, count, random)
            return found.key, found.value

        for count in (room - TAIL - 1, TAIL):
            layer.append(*states(count))
            layer.settle()
            layer.fill_rings()
            layout.advance()
        key, value = states(1)
        shape = SEQUENCES, view.query_heads, 1, view.head_size
        query = torch.randn(shape, generator=random, dtype=view.dtype, device=view.device)
        call = AttentionCall(query, key, value, None, view.head_size**-0.5, None)
        right = _reference(call, *layer.whole(key, value), None)
        found = call.new_out()
        layer.attend_newest(call, layout.sequences(), found)
        return float((found.double() - right).norm() / right.norm())


def _reference(call: AttentionCall, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention over what is read, fp64 ``[B, t, H, D]``."""
    query, keys, values = (each.double() for each in (call.query, keys, values))
    out = F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=call.scaling, enable_gqa=True
    )
    return out.transpose(1, 2)


def random_states(
    view: AttentionView, batch: int, length: int, random: torch.Generator | None = None
) -> AttentionInputs:
    """Random inputs of the attention layer ``view`` for ``length`` tokens."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=view.dtype, device=view.device)

    x = normal(batch, length, view.hidden)
    key, value = (normal(batch, view.kv_heads, length, view.head_size) for _ in range(2))
    return AttentionInputs(x, x, key.transpose(1, 2).flatten(2), key, value)
