"""Data of tasks from local files, in the form in which their authors publish it.

A file becomes the rows that lm-eval's task expects from the hub, so that prompts and metrics are lm-eval's
own.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from xquant.text import json_lines, read_utf8

Row = dict[str, Any]
Overrides = dict[str, Any]
"""Keys of lm-eval's task configuration that replace the task's own."""


@dataclass(frozen=True)
class Form:
    """A file of rows: its place in a folder of data, the fields of a row, and how a row of the hub is made
    of it."""

    folder: str
    file: str
    fields: tuple[str, ...] = ()
    convert: Callable[[Row], Row] = dict

    @property
    def says(self) -> str:
        """The form in words, for messages."""
        rows = "one CSV line" if self.file.endswith(".csv") else "one JSON object a line"
        return rows + (f" with {', '.join(self.fields)}" if self.fields else "")


def local_rows(task: str, config: Mapping[str, Any], data: Path) -> tuple[Overrides, list[Path]]:
    """Overrides with which lm-eval's ``task`` reads ``data``, a file or a folder; and the files read.

    Args:
        config: the task's configuration.

    Raises:
        ValueError: no such file, or one of another form; the message says which form.
        OSError: the file cannot be read.
    """
    from datasets import Dataset

    split = config.get("test_split") or config.get("validation_split") or "test"
    form = _form(task, split)
    files = [_find(task, data, form)]
    splits = {split: _rows(files[0], form)}
    examples = config.get("fewshot_split") or config.get("training_split")
    if examples is not None and examples not in splits:
        beside = files[0].with_stem(examples)
        if beside.is_file():
            files.append(beside)
            splits[examples] = _rows(beside, form)
        elif config.get("num_fewshot"):
            raise ValueError(
                f"{task} takes its {config['num_fewshot']} examples from a '{examples}' split:"
                f" there is no '{beside}', {form.says}"
            )
    keys = ("training_split", "validation_split", "test_split", "fewshot_split")
    absent = {key: None for key in keys if config.get(key) not in (None, *splits)}
    tables = {name: Dataset.from_list(rows) for name, rows in splits.items()}
    return {"custom_dataset": lambda **_: tables, **absent}, files


def has_examples(data: Path) -> bool:
    """Whether ``data`` holds a training split of GSM8K beside the rows to answer."""
    return _find("gsm8k", data, _form("gsm8k", "test")).with_stem("train").is_file()


def _form(task: str, split: str) -> Form:
    if task.startswith("longbench_"):
        file = f"{task.removeprefix('longbench_')}.jsonl"
        return Form("longbench", file, ("input", "context", "answers"), _longbench)
    if task == "truthfulqa_gen":
        fields = ("Question", "Correct Answers", "Incorrect Answers")
        return Form("truthfulqa", "TruthfulQA.csv", fields, _truthfulqa)
    if task.startswith("gsm8k"):
        return Form("gsm8k", f"{split}.jsonl", ("question", "answer"))
    return Form(task, f"{split}.jsonl")


def _longbench(row: Row) -> Row:
    return {**row, "question": row["input"]}


def _truthfulqa(row: Row) -> Row:
    def answers(kind: str) -> list[str]:
        return [answer.strip() for answer in row[f"{kind} Answers"].split(";")]

    return {
        "question": row["Question"],
        "correct_answers": answers("Correct"),
        "incorrect_answers": answers("Incorrect"),
    }


def _find(task: str, data: Path, form: Form) -> Path:
    """The file itself, or the one in the folder, with or without the form's own folder between."""
    if data.is_file():
        return data
    for path in (data / form.folder / form.file, data / form.file):
        if path.is_file():
            return path
    raise ValueError(
        f"no data for {task}: '{data}' holds no '{form.folder}/{form.file}' and no '{form.file}', {form.says}"
    )


def _rows(path: Path, form: Form) -> list[Row]:
    text = read_utf8(path)
    if path.suffix == ".csv":
        rows = list(enumerate(csv.DictReader(io.StringIO(text, newline="")), 2))
    else:
        rows = list(json_lines(path, text))
    if not rows:
        raise ValueError(f"'{path}' holds no rows")
    for number, row in rows:
        missing = next((field for field in form.fields if row.get(field) is None), None)
        if missing is not None:
            raise ValueError(f"'{path}', line {number}: no '{missing}' ({form.says})")
    return [form.convert(row) for _, row in rows]


# -- RULER: lm-eval's own generators, with local files in place of what they download ----------------

ESSAYS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
RULER_FILES = {
    **dict.fromkeys(ESSAYS, ("PaulGrahamEssays*.json", 'a JSON object with "text"')),
    "ruler_qa_squad": ("squad*.json", 'a JSON object with "data", as SQuAD has it'),
    "ruler_qa_hotpot": ("hotpot*.json", "a JSON array of questions, as HotpotQA has it"),
}
RULER_SAMPLES = 500
ENDLESS = ("ruler_vt", "ruler_cwe", "ruler_fwe")
"""Where no example of these is short enough, lm-eval searches for ever."""
LEAST = 1024


def is_ruler(task: str) -> bool:
    """Whether lm-eval generates the task's rows, to a length in tokens."""
    return task.startswith(("niah_", "ruler_"))


def ruler_file(task: str, context: int, data: Path | None) -> Path | None:
    """The local file that a RULER task of ``context`` tokens is made from; None where it needs none.

    Raises:
        ValueError: no such file, one of another form, or a context that is too short; OSError: the file
            cannot be read.
    """
    if task in ENDLESS and context < LEAST:
        raise ValueError(f"{task} cannot be made to {context} tokens: at least {LEAST} are needed")
    if data is None or task not in RULER_FILES:
        return None
    pattern, says = RULER_FILES[task]
    found = [data] if data.is_file() else sorted([*data.glob(f"ruler/{pattern}"), *data.glob(pattern)])
    if not found:
        raise ValueError(f"no data for {task}: '{data}' holds no 'ruler/{pattern}', {says}")
    key = {"ruler_qa_squad": "data", "ruler_qa_hotpot": None}.get(task, "text")
    held = _json(found[0])
    if not (isinstance(held, list) if key is None else isinstance(held, dict) and key in held):
        raise ValueError(f"'{found[0]}' does not fit {task}: {says}, was expected")
    return found[0]


def ruler_overrides(task: str, context: int, tokenizer: str, file: Path | None) -> Overrides:
    """Overrides that make a RULER task of ``context`` tokens of ``tokenizer``, which is a name.

    Its only metric is named after the context, as lm-eval does.
    """
    metric = {"metric": str(context), "aggregation": "mean", "higher_is_better": True}
    asked: Overrides = {
        "metric_list": [metric],
        "metadata": {"max_seq_lengths": [context], "tokenizer": tokenizer},
    }
    if file is not None and task not in ESSAYS:
        asked["custom_dataset"] = lambda **_: _questions(task, context, tokenizer, file)
    return asked


@contextmanager
def local_essays(file: Path) -> Iterator[None]:
    """Make lm-eval build its haystacks from the essays in ``file``.

    It inserts needles between sentences, which nltk's Punkt finds. Where no trained Punkt is installed, one
    is trained on the essays themselves.
    """
    import datasets
    import nltk
    from lm_eval.tasks.ruler import prepare_niah

    text = _json(file)["text"]
    sentences = prepare_niah.sent_tokenize
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        sentences = nltk.tokenize.PunktSentenceTokenizer(text).tokenize

    def forget() -> None:
        prepare_niah.get_haystack.cache_clear()
        prepare_niah.cached_sent_tokenize.cache_clear()

    forget()
    try:
        with (
            patch.object(datasets, "load_dataset", lambda *_, **__: {"text": [text]}),
            patch.object(prepare_niah, "sent_tokenize", sentences),
        ):
            yield
    finally:
        forget()


def _questions(task: str, context: int, tokenizer: str, file: Path) -> dict[str, Any]:
    """Rows of a question-answering task. A local file may hold fewer questions than lm-eval asks by
    default."""
    from datasets import Dataset
    from lm_eval.tasks.ruler import common_utils, qa_utils

    with patch.object(qa_utils, "download_json", lambda _: _answerable(_json(file))):
        read = qa_utils.read_squad if task == "ruler_qa_squad" else qa_utils.read_hotpotqa
        questions, documents = read(str(file))
    rows = qa_utils.generate_samples(
        tokenizer=common_utils.get_tokenizer(tokenizer),
        docs=documents,
        qas=questions,
        num_samples=min(RULER_SAMPLES, len(questions)),
        tokens_to_generate=qa_utils.CONFIG["tokens_to_generate"],
        max_seq_length=context,
    )
    return {"test": Dataset.from_list(rows)}


def _answerable(held: Any) -> Any:
    """SQuAD 1.1 in the form of SQuAD 2.0, in which every question says whether it has an answer."""
    for article in held["data"] if isinstance(held, dict) else ():
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                question.setdefault("is_impossible", False)
    return held


def _json(path: Path) -> Any:
    try:
        return json.loads(read_utf8(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"'{path}' is not JSON ({error.msg})") from None
