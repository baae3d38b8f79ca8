"""Runs the papers' tables and figures on SmolLM2, and keeps one results file for each.

    python benchmarks/reproduce.py --data DATA              # all, those that have a file left out
    python benchmarks/reproduce.py --data DATA xquant/table1 kvquant/table8

DATA holds the texts, ``wikitext2/test.raw``, ``wikitext2/train-slice.raw`` and ``c4/passages.jsonl``, and the
tasks' files (see docs/evaluation-tasks.md). What is finished is kept in build/reproduce: the same command
goes on from there. Experiments that time something run when they are named; nothing else should run then.
"""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "reproduce"
RESULTS = ROOT / "benchmarks" / "results" / "reproduce"
XQUANT = Path(sys.executable).with_name("xquant")

TEXT = "--text data/wikitext2/test.raw --windows 4"
CALIBRATION = "--calibration-text data/wikitext2/train-slice.raw"
CALIBRATED = f"{TEXT} {CALIBRATION}"
BF16 = "--dtype bfloat16"  # twice as fast here
C4 = f"{BF16} --text data/c4/passages.jsonl --windows 4 {CALIBRATION}"
LONG = f"{BF16} --text data/wikitext2/test.raw --context 8192 --windows 2 {CALIBRATION}"
TASKS = f"{BF16} --data data"
LONGBENCH = f"{TASKS} --limit 20 --answer 16"
MANY_TASKS = f"{TASKS} --limit 8 --answer 16"


def chosen(names: str) -> str:
    """The options for tasks of LongBench, of the names without their beginning."""
    return " ".join(f"--task longbench_{name}" for name in names.split())


RUNS: dict[str, str] = {
    "xquant/table1": TEXT,
    "xquant/table4": CALIBRATED,
    "xquant/tableB.1": TEXT,
    "xquant/tableB.2": TEXT,
    "xquant/figure1": CALIBRATED,
    "xquant/figure3": TEXT,
    "xquant/figureB.2": TEXT,
    "xquant/table2": f"{MANY_TASKS} {chosen('narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa')}",
    "xquant/table3": f"{TASKS} --limit 20 --answer 64",
    "xquant/figureB.3": TEXT,
    "crosslayer/figure2": TEXT,
    "crosslayer/table2": f"{TASKS} --limit 40",
    "crosslayer/table3": MANY_TASKS,
    **dict.fromkeys((f"crosslayer/table{n}" for n in (1, 4, 5, 6, 7, 8)), LONGBENCH),
    "kvquant/table2": f"{BF16} {CALIBRATION} --limit 10",
    "kvquant/table3": f"{LONGBENCH} {CALIBRATION} {chosen('narrativeqa hotpotqa trec')}",
    "kvquant/table4": f"{TASKS} {CALIBRATION} --context 1024 --limit 4 --answer 48",
    "kvquant/table7": "",
    "kvquant/table8": "",
    "kvquant/table9": TEXT,
    "kvquant/table20": TEXT,
    "kvquant/table19": C4,
    "kvquant/figure1": f"{BF16} {CALIBRATED}",
    "kvquant/figure2": TEXT,
    "kvquant/figure3": LONG,
    "kvquant/figure4": TEXT,
    **dict.fromkeys((f"kvquant/table{n}" for n in (1, 18)), CALIBRATED),
    **dict.fromkeys((f"kvquant/table{n}" for n in (5, 10, 11, 12, 13, 14, 17, 21)), f"{BF16} {CALIBRATED}"),
}
TIMED: dict[str, str] = {
    "crosslayer/figure3": "--text data/wikitext2/test.raw --context 1152 --windows 4",
    "kvquant/table6": f"{BF16} --context 16384",
    "kvquant/table15": BF16,
    "kvquant/table16": f"{BF16} {CALIBRATION}",
    "kvquant/table22": f"{BF16} --context 16384",
}
MULTI_HEAD = ("xquant/table1", "xquant/table4", "xquant/figure1", "xquant/figure3")
"""Whose paper has a model without shared key/value heads: run on the same model in that form as well."""
SECOND = ("xquant/figureB.3",)
"""The same experiment as another, meant for a second model: run on that form alone."""


def models(experiment: str) -> tuple[str, ...]:
    if experiment in SECOND:
        return ("smollm2-mha",)
    return ("smollm2", "smollm2-mha") if experiment in MULTI_HEAD else ("smollm2",)


def command(experiment: str, model: str, name: str) -> str:
    kept = f"--resume runs/{model} --json {name}.json"
    return " ".join(filter(None, ["xquant reproduce", experiment, model, (RUNS | TIMED)[experiment], kept]))


@click.command()
@click.argument("experiments", nargs=-1, type=click.Choice([*RUNS, *TIMED]))
@click.option("--data", required=True, type=click.Path(exists=True, path_type=Path))
def main(experiments: tuple[str, ...], data: Path) -> None:
    """Run EXPERIMENTS, or all that have no results file and time nothing, on the texts of a folder."""
    WORK.mkdir(parents=True, exist_ok=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    link = WORK / "data"  # so that the commands in the results name no folder of this machine
    link.unlink(missing_ok=True)
    link.symlink_to(data.resolve())
    for experiment in experiments or RUNS:
        for model in models(experiment):
            name = experiment.replace("/", "-") + ("-mha" if model == "smollm2-mha" else "")
            target = RESULTS / f"{name}.json"
            if target.exists() and not experiments:
                continue
            line = command(experiment, model, name)
            click.echo(f"$ {line}")
            if subprocess.run([XQUANT, *shlex.split(line)[1:]], cwd=WORK).returncode:
                click.echo(f"{name} failed", err=True)
            else:
                shutil.move(WORK / target.name, target)


if __name__ == "__main__":
    main()
