"""Runs the papers' tables and figures on SmolLM2, and keeps one results file for each.

    python benchmarks/reproduce.py --data DATA              # all, those that have a file left out
    python benchmarks/reproduce.py --data DATA xquant/table1 kvquant/table6

DATA holds the texts: ``wikitext2/test.raw`` and ``wikitext2/train-slice.raw``. What is finished is kept in
build/reproduce, so the same command goes on from there. None of these experiments is timed.
"""

import shlex
import subprocess
import sys
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "reproduce"
XQUANT = Path(sys.executable).with_name("xquant")

TEXT = "--text {data}/wikitext2/test.raw --windows 4"
CALIBRATED = f"{TEXT} --calibration-text {{data}}/wikitext2/train-slice.raw"

RUNS: dict[str, str] = {
    "xquant/table1": TEXT,
    "xquant/table4": CALIBRATED,
    "xquant/tableB.1": TEXT,
    "xquant/tableB.2": TEXT,
    "xquant/figure1": CALIBRATED,
    "xquant/figure3": TEXT,
    "xquant/figureB.2": TEXT,
    "crosslayer/figure2": TEXT,
    "kvquant/table7": "",
    "kvquant/table8": "",
    "kvquant/table9": TEXT,
    "kvquant/table20": TEXT,
    "kvquant/figure2": TEXT,
    "kvquant/figure4": TEXT,
    **dict.fromkeys((f"kvquant/table{n}" for n in (1, 10, 11, 12, 13, 14, 17, 21)), CALIBRATED),
}
MULTI_HEAD = ("xquant/table1", "xquant/table4", "xquant/figure1", "xquant/figure3")
"""Whose paper has a model without shared key/value heads: run on the same model in that form as well."""


def command(experiment: str, model: str, data: str, target: Path) -> str:
    options = RUNS[experiment].format(data=data)
    return (
        f"xquant reproduce {experiment} {model} {options} --resume build/reproduce/{model}"
        f" --json {target.relative_to(ROOT)}"
    )


@click.command()
@click.argument("experiments", nargs=-1)
@click.option("--data", required=True, help="Folder of the texts.")
def main(experiments: tuple[str, ...], data: str) -> None:
    """Run EXPERIMENTS, or all that have no results file."""
    for experiment in experiments or RUNS:
        for model in ("smollm2", *(["smollm2-mha"] if experiment in MULTI_HEAD else [])):
            name = experiment.replace("/", "-") + ("-mha" if model == "smollm2-mha" else "")
            target = RESULTS / f"{name}.json"
            if target.exists() and not experiments:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            line = command(experiment, model, data, target)
            click.echo(f"$ {line}")
            done = subprocess.run([XQUANT, *shlex.split(line)[1:]], cwd=ROOT)
            if done.returncode:
                click.echo(f"{name} failed", err=True)


if __name__ == "__main__":
    main()
