"""Answers to questions about long prompts: GSM8K and six tasks of RULER, with several caches.

    python benchmarks/tasks.py --data data --gsm8k 50 --ruler 1024:8 --ruler 4096:5 --json tasks.json

RULER's tasks are one or two of each of its kinds: a number among repeated sentences and among essays, one of
several numbers, variables that are traced, the commonest words, and questions about paragraphs.

A prompt is read once for all caches, the full one first: its tokens attend to each other exactly. Its last 16
tokens and the answer read what is stored, as a question about a text that was read before. Beside the score
of a task stand two measures of a cache, taken on the same prompts: KL on the prompt's last tokens, and how
many of 32 greedy tokens are the full cache's. Answers to RULER end after 48 tokens.
"""

from collections.abc import Sequence
from typing import Any

import click
import torch

from xquant import load_model, own_calibration, parse_method
from xquant.cli.progress import progress
from xquant.results import stamp, write_json
from xquant.runs import Runs, identity
from xquant_lab.evals.journal import Journal
from xquant_lab.evals.task_lookup import find_tasks
from xquant_lab.evals.tasks import Settings, evaluate

METHODS = "kivi-4bit", "xquant-4bit", "tc-2bit", "tc-cl-2bit", "tc-cl-1bit"
RULER = (
    *("niah_single_1", "niah_single_2", "niah_multikey_1"),
    *("ruler_vt", "ruler_fwe", "ruler_qa_squad"),
)
MOST = 48
"""Tokens of an answer to RULER. It allows 30 to 128: numbers come first, and a small model talks on."""


@click.command()
@click.option("--data", required=True, help="The folder of the tasks' data.")
@click.option("--gsm8k", "problems", default=0, help="Rows of GSM8K.")
@click.option("--ruler", "lengths", multiple=True, help="Tokens of RULER's prompts, and how many: 1024:20.")
@click.option("--method", "specs", multiple=True, default=METHODS)
@click.option("--resume", help="A folder that keeps what is finished.")
@click.option("--json", "target", required=True)
def main(
    data: str,
    problems: int,
    lengths: tuple[str, ...],
    specs: tuple[str, ...],
    resume: str | None,
    target: str,
) -> None:
    model, tokenizer = load_model("smollm2", torch.bfloat16)
    methods = [parse_method(spec) for spec in specs]
    # What a model writes is that of the model in fp32, as for all other results.
    writer, _ = load_model("smollm2")
    made = [own_calibration(writer, tokenizer, m) for m in methods if m.needs_calibration]
    wanted: list[tuple[Sequence[str], list[int], Settings]] = []
    if problems:
        wanted.append((["gsm8k"], [], Settings(problems, compare=True)))
    for length in lengths:
        context, _, rows = length.partition(":")
        wanted.append((RULER, [int(context)], Settings(int(rows), most=MOST, compare=True)))
    runs = Runs(resume, identity(model, "", made))
    found: list[dict[str, Any]] = []
    with progress("running tasks") as show:
        journal = Journal(runs, show)
        for names, contexts, settings in wanted:
            tasks = find_tasks(names, data, contexts)
            asked = evaluate(model, tokenizer, methods, tasks, settings, made, journal)
            found += [row.to_dict() for row in asked]
    write_json(target, stamp(found, model="smollm2", dtype="bfloat16"))


if __name__ == "__main__":
    main()
