"""What a forward pass holds besides weights and cache: by formula, for transformers' own modules with sdpa.

A pass reads ``c`` new tokens of each of ``B`` sequences to a context of ``T``: a decode step reads one, a
prefill a chunk. Layers run one after the other, and each gives back what it took. So the most is held in one
of three places, beside ``4 c d`` for the residual stream, its norm, and what the cache looks at:

- the MLP: ``3 c I`` for the gate, the other projection and their product;
- attention: ``3 c H D`` for queries, rotated queries and the answer, keys and values of the whole context as
  they are read back, a step of which holds up to ``5 T G D``, and a mask, ``c T`` as truth values and as
  numbers. sdpa then has keys and values, ``2 T G D``, and copies of them for every query head, ``2 T H D``,
  where heads are grouped and there is a mask. Layers that are predicted from those below also hold ``3 T``
  times what they pass from layer to layer;
- the logits of the last position, twice: in the dtype of the model and in fp32.

Keys and values are read back as the reference does, since a prefill does so with any kernel. A decode step
with a kernel that reads codes in place takes less. `tests/analysis/test_activations.py` holds all this to
measured peaks: it lies between 0.65 and 1.5 times of them.
"""

from typing import Any

from .. import compat
from .memory import CacheLayout

KEPT, MLP, QUERIES, READ, CARRIED = 4, 3, 3, 5, 3
"""How many at a time, as above."""


class Activations:
    """The most bytes of a pass over a model with a method's cache."""

    def __init__(self, layout: CacheLayout) -> None:
        config: Any = compat.text_config(layout.skeleton.model)
        views = [codec.view for codec in layout.codecs]
        self._item: int = views[0].dtype.itemsize
        self._hidden = views[0].hidden
        self._keys = max(view.kv_width for view in views)
        self._queries = max(view.query_heads * view.head_size for view in views)
        wide = getattr(config, "intermediate_size", None) or 4 * self._hidden
        self._mlp: int = max(wide) if isinstance(wide, list | tuple) else wide
        self._vocabulary: int = config.vocab_size
        self._accumulated_width = max(codec.above_width for codec in layout.codecs)

    def prefill(self, context: int, batch: int, chunk: int) -> int:
        """Of the last chunk of a prompt that ends at ``context`` tokens."""
        return batch * self._sequence(context, min(chunk, context))

    def decode(self, context: int, batch: int) -> int:
        """Of a step that ends at ``context`` tokens."""
        return batch * self._sequence(context, 1)

    def _sequence(self, context: int, new: int) -> int:
        """Of one sequence, ``new`` tokens of which are read."""
        item, masked = self._item, 1 < new < context
        mask = new * context * (item + 1) if masked else 0
        copies = 2 * self._queries if masked and self._queries > self._keys else 0
        read = READ * self._keys if new < context else 0
        states = context * (max(read, 2 * self._keys + copies) + CARRIED * self._accumulated_width)
        kept = KEPT * new * self._hidden * item
        attention = kept + item * (QUERIES * new * self._queries + states) + mask
        mlp = kept + MLP * new * self._mlp * item
        return max(attention, mlp, kept + self._vocabulary * (item + 4))
