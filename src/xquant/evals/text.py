"""Texts to measure on: a file, or one that every Python carries."""

import json
from pathlib import Path

HELP_TOPICS = "help-topics"
"""Name of the built-in text: the language reference that Python's ``help()`` shows."""


def read_text(source: str | Path) -> str:
    """The text of ``source``.

    Args:
        source: ``"help-topics"``; a ``.jsonl`` file (its ``"text"`` fields, joined by blank lines); a
            ``.raw`` file, which is how WikiText comes (its rows, one a line, joined by blank lines, as
            the papers do); or any other UTF-8 file (read whole).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a folder, not UTF-8, not the JSON expected, or nothing in it.
        OSError: the file cannot be read.
    """
    if source == HELP_TOPICS:
        return _help_topics()
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(f"there is no text file '{path}'")
    if path.is_dir():
        raise ValueError(f"'{path}' is a folder, not a text file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"'{path}' is not UTF-8 text ({error.reason})") from None
    if path.suffix.lower() == ".jsonl":
        text = "\n\n".join(_text_fields(path, text))
    if path.suffix.lower() == ".raw":
        # As the data set's rows are: blank ones empty, others with their line end.
        rows = (f"{row}\n" if row.strip() else "" for row in text.removesuffix("\n").split("\n"))
        text = "\n\n".join(rows)
    if not text.strip():
        raise ValueError(f"'{path}' holds no text")
    return text


def text_name(source: str | Path) -> str:
    """What a result calls the text: the built-in name, or the file's name without its folder."""
    return Path(source).name


def _text_fields(path: Path, lines: str) -> list[str]:
    texts = []
    # Not splitlines(): a JSON string may hold separators such as U+2028 as they are.
    for number, line in enumerate(lines.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"'{path}', line {number}: not JSON ({error.msg})") from None
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise ValueError(f"'{path}', line {number}: no \"text\" field with a string")
        texts.append(row["text"])
    return texts


def _help_topics() -> str:
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError:
        raise FileNotFoundError(
            f"this Python was installed without its '{HELP_TOPICS}' (pydoc_data): give a text file"
        ) from None
    return "\n\n".join(topics[name] for name in sorted(topics))
