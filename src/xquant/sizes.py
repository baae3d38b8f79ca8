"""Numbers of bytes as people read them."""


def readable(size: float) -> str:
    """``size`` bytes in three digits or so: ``17.62 MB``."""
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"
