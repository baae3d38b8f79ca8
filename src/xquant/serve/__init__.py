"""The methods inside an inference engine: many sequences of unequal length.

An engine owns the memory and decides which sequence runs. The past of its layers is a `past.paged.PagedPast`,
as that of a static cache is. What stands here builds those: ``fit.py`` says what can be served, and why not,
``build.py`` makes codecs, ``capacity.py`` counts bytes, ``recode.py`` stores blocks. None of them knows an
engine.
"""
