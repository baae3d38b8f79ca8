"""What an engine is told when it starts: the method, what reads it, and what fits."""

from collections import Counter
from collections.abc import Sequence

from ..kernels.backend import NOTHING_PACKED
from ..kernels.choose import choose
from ..kernels.torch import FOLDED, REFERENCE
from ..methods import LayerCodec
from ..sizes import readable
from .build import Model
from .capacity import USUAL_BATCH, Room, States, stock_room
from .fit import Wanted

_MUCH = 1 << 50
"""Bytes of a pool that has room for any request."""


def described(asked: Wanted, model: Model, codecs: Sequence[LayerCodec], room: Room, context: int) -> str:
    """In a line: the method, the kernels, bytes a token of one shard, and how many times the tokens of vLLM's
    own cache fit in requests of ``context`` tokens; and what is not compressed, and why."""
    stock = stock_room(model, _states(room))
    tokens = [each.tokens(_MUCH, context, USUAL_BATCH) for each in (room, stock)]
    chosen = Counter(str(choose(codec, room.block, asked.kernel)) for codec in codecs)
    kernels = ", ".join(name if len(chosen) == 1 else f"{name} in {n}" for name, n in chosen.items())
    nbytes, times = sum(room.pages) / room.block, tokens[0] / tokens[1]
    parts = [
        f"{asked.method.spec} in {len(codecs)} layers, read by {kernels}",
        f"{readable(nbytes)} a token, {times:.2f} times the tokens of vLLM in requests of {context:,}",
        f"not compressed: {'; '.join(_whole(asked, model, room))}",
    ]
    return ". ".join(parts)


def left_to_torch(asked: Wanted, codecs: Sequence[LayerCodec], block: int) -> str:
    """Why no kernel reads some of the layers; empty where kernels read all that is packed, or none was asked
    for."""
    choices = [choose(codec, block, asked.kernel) for codec in codecs] if asked.kernel == "auto" else []
    found = {each.why for each in choices if each.backend in (REFERENCE, FOLDED)} - {NOTHING_PACKED}
    return "; ".join(sorted(found))


def _whole(asked: Wanted, model: Model, room: Room) -> list[str]:
    """What is kept as it is, and why."""
    newest = room.block + asked.method.tail
    found = [f"a request's newest tokens, up to {newest}, until they fill a block"]
    if sink := asked.method.sink:
        found.append(f"the first {sink} tokens (sinks), beside the pool")
    for window, layers in sorted(model.windows.items()):
        found.append(f"{layers} layers with windows of {window.tokens} tokens, which vLLM keeps itself")
    for each in _states(room):
        found.append(f"{each.layers} states of {readable(each.page)}, which vLLM keeps itself")
    return found


def _states(room: Room) -> list[States]:
    return [each for each in room.others if isinstance(each, States)]
