"""The past of a layer of attention: one past, in two memories.

Whole blocks are sealed, packed by a method. The newest tokens are kept as they are, and so are sinks. Where
they lie depends on who owns the memory:

- A cache of its own lets it grow (`growing`): blocks lie in a `Stream` of slabs (`stream`, `slabs`), and new
  tokens in a tail (`rows`, `built`). The sequences of a batch have equally many tokens (`tokens`).
- An engine, or a static cache, takes it once (`paged`): blocks lie in pages of one size (`pages`), and the
  new tokens of a sequence in its ring. A `Step` says for all layers where new tokens go and what they read
  (`step`, `sequences`). `pageable` says which codecs have pages.

`growing_layer` and `static_layer` are the two as transformers knows the layer of a cache.
"""
