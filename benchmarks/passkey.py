"""Why kvquant-3bit-1% loses passkeys where every token of the prompt reads the store: errors and likelihoods.

    python benchmarks/passkey.py --text wikitext2/train-slice.raw --output passkey-errors-smollm2.json

Hidden numbers are asked for at 2,048 tokens, in both ways of reading the prompt: with the calibration as the
paper has it, with one on prompts that hold other numbers, with ranges found online, and with more outliers.
Beside it stands how far the stored keys and values of the number's digits are off, and those of all tokens.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from xquant import Calibration, parse_method
from xquant.calibrators.run import calibrate_together
from xquant.cli.progress import progress
from xquant.load import load_model
from xquant.methods import Method
from xquant.progress import Progress
from xquant.results import stamp, write_json
from xquant.text import cut_windows, read_text
from xquant_lab.evals import passkey as task
from xquant_lab.evals.journal import Journal
from xquant_lab.evals.reading import read_together

CONTEXT, SAMPLES, WINDOWS = 2048, 3, 16
PLAIN = ("full", "kivi-4bit", "kivi-3bit", "xquant-3bit")
CALIBRATED = (
    "kvquant-3bit-1%",
    "kvquant-3bit",
    "kvquant-3bit-5%",
    "kvquant-3bit-1%:scales=online",
    "kvquant-4bit-1%",
)
NUMBERS = "kvquant-3bit-1%"
"""What is calibrated on prompts with numbers too."""


def numbers(tokenizer: Any) -> Tensor:
    """Prompts with other numbers, ``[WINDOWS, CONTEXT]``."""
    depth = 0.05  # none of those that are asked
    asked = list(task.prompts_of(tokenizer, CONTEXT + 99, depth, WINDOWS))
    return torch.tensor([ids[:CONTEXT] for _, ids in asked])


@torch.inference_mode()
def errors(model: Any, tokenizer: Any, methods: dict[Method, Calibration | None]) -> Iterator[dict[str, Any]]:
    """Of every method, squared errors over squared norms, mean of layers: digits, and the median token."""
    for depth in task.DEPTHS:
        for _, ids in task.prompts_of(tokenizer, CONTEXT, depth, 1):
            found = read_together(model, methods, torch.tensor([ids]))
            full = found[parse_method("full")]
            sealed = len(ids) // 128 * 128
            digits = [i for i in range(sealed) if tokenizer.decode([ids[i]]).strip().isdigit()]
            for method, cache in found.items():
                if method == parse_method("full"):
                    continue
                for name, which in (("keys", 0), ("values", 1)):
                    off = torch.stack(list(map(partial(_off, which), full.compressed, cache.compressed)))
                    each = off.mean(0)[:sealed]
                    yield {
                        "method": method.spec,
                        "states": name,
                        "depth": depth,
                        "digits": each[digits].mean().item(),
                        "median": each.median().item(),
                        "worst": each.max().item(),
                    }


def _off(which: int, full: Any, own: Any) -> Tensor:
    """Of one layer and each token ``[T]``."""
    exact, stored = (layer.states()[which].float() for layer in (full, own))
    return ((exact - stored).square().sum((1, 3)) / exact.square().sum((1, 3)))[0]


def asked(
    model: Any,
    tokenizer: Any,
    methods: Sequence[Method],
    calibrations: Sequence[Calibration],
    text: str,
    show: Progress,
) -> Iterator[dict[str, Any]]:
    """Rows of both ways of reading, by depth."""
    for attend in ("chunk", "store"):
        for row in task.passkey(
            model,
            tokenizer,
            methods,
            task.Prompts((CONTEXT,), samples=SAMPLES),
            attend,
            calibrations,
            Journal(tell=show),
        ):
            yield {**row.to_dict(), "calibrated_on": text}


@click.command()
@click.option("--text", required=True, type=click.Path(exists=True), help="To calibrate on.")
@click.option("--output", required=True, type=click.Path(path_type=Path))
def main(text: str, output: Path) -> None:
    """Measure, and write the rows as JSON."""
    model, tokenizer = load_model("smollm2", torch.bfloat16, "cpu")
    samples = cut_windows(model, tokenizer, read_text(text), CONTEXT, WINDOWS)
    calibrated = list(map(parse_method, CALIBRATED))
    plain = list(map(parse_method, PLAIN))
    with progress("calibrating") as show:
        made = calibrate_together(model, samples, calibrated, Path(text).name, show)
        other = calibrate_together(
            model, numbers(tokenizer), [parse_method(NUMBERS)], "passkey prompts", show
        )
    use = dict(zip(calibrated, made, strict=True))
    rows = [{"part": "errors", **row} for row in errors(model, tokenizer, dict.fromkeys(plain) | use)]
    with progress("asking") as show:
        ask = partial(asked, model, tokenizer, show=show)
        rows += ask(methods=[*plain, *calibrated], calibrations=made, text="WikiText-2")
        rows += ask(methods=[parse_method(NUMBERS)], calibrations=other, text="passkey prompts")
    write_json(output, stamp(({"part": "asked", **row} for row in rows), model="smollm2"))


if __name__ == "__main__":
    main()
