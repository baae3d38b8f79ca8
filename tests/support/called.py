"""Code of pages and docstrings, which call the cache as the newest transformers does."""

from xquant.compat import CACHE


def as_called(source: str) -> str:
    """``source`` with the cache called as the installed transformers does."""
    return source.replace("cache=cache", f"{CACHE}=cache").replace("out.cache", f"out.{CACHE}")
