"""Offline statistics of a model on some text, for the methods that want them."""
