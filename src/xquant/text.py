"""Texts to measure on: a file, one that every Python carries, or a data set of the hub."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

HELP_TOPICS = "help-topics"
"""Name of the built-in text: the language reference that Python's ``help()`` shows."""
C4_ROWS = 1100
"""Rows of C4's first validation file, joined by spaces: what GPTQ and then KVQuant measure on."""


def read_text(source: str | Path) -> str:
    """The text of ``source``.

    Args:
        source: ``"help-topics"``; ``"wikitext2"`` or ``"c4"``, from the hub; a ``.jsonl`` file (its
            ``"text"`` fields, joined by blank lines); a ``.raw`` file, which is how WikiText comes (its
            rows, one a line, joined by blank lines, as the papers do); or any other UTF-8 file (read
            whole).

    Raises:
        FileNotFoundError: there is no such file, or no hub.
        ModuleNotFoundError: ``datasets`` is not installed, and the text is one of the hub's.
        ValueError: a folder, not UTF-8, not the JSON expected, or nothing in it.
        OSError: the file cannot be read.
    """
    if str(source) in _READERS:
        return _READERS[str(source)]()
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(f"there is no text file '{path}'")
    if path.is_dir():
        raise ValueError(f"'{path}' is a folder, not a text file")
    text = read_utf8(path)
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


def cut_windows(model: Any, tokenizer: Any, text: str, context: int, windows: int) -> "Tensor":
    """The text's first tokens as ``[windows, context]``; ValueError where it holds fewer."""
    import torch

    from .positions import check_context

    if context < 2:
        raise ValueError(f"a context of {context} scores nothing: at least 2 tokens are needed")
    if windows < 1:
        raise ValueError(f"{windows} windows measure nothing: at least 1 is needed")
    check_context(model, context)
    # verbose=False: a text longer than the model's context is no mistake here.
    encoded = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    held = len(encoded) // context
    if held == 0:
        raise ValueError(
            f"the text holds {len(encoded)} tokens and one window needs {context}:"
            " give a longer text or a smaller context"
        )
    if windows > held:
        raise ValueError(f"the text holds {held} window{'s' * (held > 1)} of {context} tokens, not {windows}")
    return torch.tensor(encoded[: windows * context], device="cpu").view(windows, context)


def read_utf8(path: Path) -> str:
    """The file's text, without a byte order mark; ValueError where it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"'{path}' is not UTF-8 text ({error.reason})") from None


def json_lines(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON objects of ``text``, which is that of ``path``, with the numbers of their lines; ValueError
    where a line is none."""
    # Not splitlines(): a JSON string may hold separators such as U+2028 as they are.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"'{path}', line {number}: not JSON ({error.msg})") from None
        if not isinstance(row, dict):
            raise ValueError(f"'{path}', line {number}: not a JSON object")
        yield number, row


def _text_fields(path: Path, lines: str) -> list[str]:
    texts = []
    for number, row in json_lines(path, lines):
        if not isinstance(row.get("text"), str):
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


def _wikitext2() -> str:
    rows = _hub("wikitext2", "Salesforce/wikitext", "wikitext-2-raw-v1", split="test")
    return "\n\n".join(rows["text"])


def _c4() -> str:
    files = {"validation": "en/c4-validation.00000-of-00008.json.gz"}
    rows = _hub("c4", "allenai/c4", data_files=files, split="validation")
    return " ".join(rows[:C4_ROWS]["text"])


def _hub(name: str, *arguments: str, **more: Any) -> Any:
    import datasets

    try:
        return datasets.load_dataset(*arguments, **more)
    # Whatever the hub's client makes of a network that is not there.
    except Exception as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FileNotFoundError(
            f"the data set '{name}' could not be had from the hub ({line}): give a file"
        ) from error


_READERS: dict[str, Callable[[], str]] = {
    HELP_TOPICS: _help_topics,
    "wikitext2": _wikitext2,
    "c4": _c4,
}
NAMES = tuple(_READERS)
"""Texts that are not files."""
