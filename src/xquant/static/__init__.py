"""A compressed cache in memory of a fixed size: what a decode step reads and writes stays where it is.

`cache` is what transformers is given, `layer` one layer of it, and `places` what is known of its tokens;
`build` makes layers, or says why there are none; `trial` compares what reads pages with torch;
`mark` tells recorded graphs which cache they are of.
Pages, rings and kernels are those by which an inference engine is served (`serve`).
"""
