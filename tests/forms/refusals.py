"""What a form refuses of what is promised, each by one line that begins like this; and the table of all."""

from . import changing, failing, reading
from .forms import FORMS
from .promise import KEPT

PROMISES = {
    name: each
    for part in (reading, failing, changing)
    for name, each in KEPT.items()
    if each.keep.__module__ == part.__name__
}
"""In the order of the table."""

STATIC = ("static", "static_copied", "static_compiled")
_FIXED = dict.fromkeys(STATIC, "the sequences of a static cache stay as they are")
_PLACED = "prefixes of this cache cannot be stored: its tokens have positions of their own"
REFUSED: dict[str, dict[str, str]] = {
    "padding": {"stored": "the ids of one prompt are needed"},
    "packed": {"stored": _PLACED},
    "images": {"stored": _PLACED},
    "hybrids": dict.fromkeys(STATIC, "kivi-16bit:group=32 has no static cache: layer 0 has"),
    "windows": dict.fromkeys(STATIC, "kivi-16bit:group=32 has no static cache: layer 0 has"),
    "gradients": dict.fromkeys(
        ("compiled", "static_compiled"),
        "a compressed cache cannot be used in this compiled forward pass: gradients are recorded",
    ),
    "saving": dict.fromkeys(STATIC, "a StaticKVCache is not saved"),
    "conversion": dict.fromkeys(STATIC, "'StaticKVCache' object has no attribute 'converted'"),
    "crop_far": dict.fromkeys(STATIC, "a static cache goes back 16 tokens at most"),
    "repeat": _FIXED,
    "select": _FIXED,
    "reorder": _FIXED,
}
"""Of a promise, the forms that refuse it, and how the line begins."""


def table() -> str:
    """Promises by forms, in Markdown: where a number stands, the line under it refuses."""
    lines: list[str] = []

    def cell(promise: str, form: str) -> str:
        line = REFUSED.get(promise, {}).get(form)
        if line is None:
            return "yes"
        if line not in lines:
            lines.append(line)
        return str(lines.index(line) + 1)

    rows = [[promise.said, *(cell(name, form) for form in FORMS)] for name, promise in PROMISES.items()]
    head = ["", *(form.said for form in FORMS.values())]
    written = [head, ["---"] * len(head), *rows]
    body = "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in written)
    notes = "\n".join(f'{number}. "{line} …"' for number, line in enumerate(lines, 1))
    return f"{body}\n\n{notes}\n"
