"""What Triton compiles: a file for each kernel, and the functions that kernels share.

`attend`, `attend_exact` and `combine` attend over keys and values. `rebuild`, `sum_states` and `accumulate`
read the rows that they are rebuilt from. `append` puts new tokens into rings, `seal` packs blocks. What they
share: `unpack` and `states` make numbers of packed blocks, `products` multiplies with them, `exact` attends
over exact tokens, `softmax` is online softmax.
"""
