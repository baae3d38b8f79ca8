"""A model that lm-evaluation-harness can run, and small files of questions in the forms of real data."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from support.models import tiny
from support.word_tokenizer import word_tokenizer


def harness_tokenizer() -> Any:
    """The word tokenizer with an end of text, which lm-eval wants; nothing generates it."""
    tokenizer = word_tokenizer()
    tokenizer.eos_token = "w130"
    return tokenizer


def harness_folder(folder: Path) -> Path:
    """A tinier llama with that tokenizer."""
    tiny("llama", num_hidden_layers=2).save_pretrained(folder)
    harness_tokenizer().save_pretrained(folder)
    return folder


def words(start: int, count: int) -> str:
    return " ".join(f"w{2 + (start * 31 + i * i) % 120}" for i in range(count))


def write_lines(file: Path, rows: Iterable[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def gsm8k(folder: Path, split: str = "test", count: int = 3) -> Path:
    rows = [{"question": words(i, 9 + 4 * i), "answer": f"{words(i, 3)}\n#### {i}"} for i in range(count)]
    return write_lines(folder / "gsm8k" / f"{split}.jsonl", rows)


def truthfulqa(folder: Path) -> Path:
    """Two questions in the form of 2021: a byte order mark, answers after semicolons."""
    file = folder / "truthfulqa" / "TruthfulQA.csv"
    file.parent.mkdir(parents=True, exist_ok=True)
    heading = "Type,Category,Question,Best Answer,Correct Answers,Incorrect Answers,Source\r\n"
    rows = [f'A,B,{words(i, 5)}?,w5,"w5 w6; w7",w8; w9,C\r\n' for i in range(2)]
    file.write_bytes(("\ufeff" + heading + "".join(rows)).encode())
    return file


def longbench(folder: Path, name: str = "hotpotqa", count: int = 2) -> Path:
    rows = [
        {"input": words(i, 4), "context": words(i, 40), "answers": ["w5 w6"], "all_classes": None}
        for i in range(count)
    ]
    return write_lines(folder / "longbench" / f"{name}.jsonl", rows)


def choices(folder: Path) -> Path:
    """A task of one's own, as a YAML file: the best of three continuations, and its rows beside it."""
    rows = [
        {
            "ask": words(i, 6 + 7 * i),
            "answers": [words(i, 1), words(i, 3), words(i + 1, 5)],
            "gold": 1,
        }
        for i in range(4)
    ]
    data = write_lines(folder / "choices.jsonl", rows)
    file = folder / "choices.yaml"
    file.write_text(f"""
task: choices
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{ask}}}}"
doc_to_choice: answers
doc_to_target: gold
""")
    return file
