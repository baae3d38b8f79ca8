"""The methods inside an inference engine: pages instead of streams, many sequences of unequal length.

An engine owns the memory and decides which sequence runs. What stands here serves one attention layer of it:
``layer.py`` writes new tokens, seals blocks into pages and attends; ``fit.py`` says what can be served, and
why not; ``rotary.py`` has the angles of an engine's rotary embedding. None of them knows an engine.

A page is a sealed block of one layer, in the bytes of docs/format.md: `store.pages.PageLayout` places the
fields that the codec's segments describe. The tokens of a block that is not whole lie as they are in the
*ring*, one block of rows a sequence and layer.
"""
