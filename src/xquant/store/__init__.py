"""The compressed past of a model's layers: sealed blocks, sinks and the newest tokens."""
