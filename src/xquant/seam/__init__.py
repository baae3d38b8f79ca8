"""Between a model of transformers and a cache: what is seen of a forward pass, and what attends in it."""
