"""The laboratory: what measures methods, a package for each kind of result, and the verbs that it adds to the
command ``xquant``."""
