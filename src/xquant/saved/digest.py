"""The digest that a safetensors file holds of itself: a SHA-256, taken with zeros in its own place."""

import hashlib

BLANK = "0" * 64
"""What stands in place of the digest, as ``sha256`` among the metadata, until it is known."""
_MARK = b'"sha256":"'


def with_digest(content: bytes) -> bytes:
    """``content`` with its digest in place of `BLANK`."""
    start = content.index(_MARK) + len(_MARK)
    return content[:start] + _digest(content, start) + content[start + len(BLANK) :]


def is_intact(content: bytes) -> bool:
    """Whether ``content`` still has the digest that it holds."""
    start = content.find(_MARK) + len(_MARK)
    return content[start : start + len(BLANK)] == _digest(content, start)


def _digest(content: bytes, start: int) -> bytes:
    found = hashlib.sha256(content[:start])
    found.update(BLANK.encode())
    found.update(memoryview(content)[start + len(BLANK) :])
    return found.hexdigest().encode()
