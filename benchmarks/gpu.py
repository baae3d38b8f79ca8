"""All that a borrowed GPU is wanted for, in less than ten minutes.

    python benchmarks/gpu.py --output results --cache gpu-cache.tar.xz

It runs in a copy of the repository and installs nothing: what it needs is torch with CUDA, Triton,
transformers, click, rich, pytest and hypothesis. Stages follow one another, the most wanted first. One
process measures, and is started anew where it crashes or a stage takes too long; tests and tools that may
crash have processes of their own. After every stage the folder has its rows (`NAME.json`), `stages.json`,
`bars.json`, the fastest ways to launch a kernel (`tuned.json`), and all tables (`tables.txt`). `--cache`
brings kernels that `make gpu-cache` has compiled.

`--quick --device cpu` rehearses it without a GPU, on a model of next to nothing, in Triton's interpreter:
what that measures means nothing.
"""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab/src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from on_gpu import kept
from on_gpu.apart import COMMANDS, run
from on_gpu.plan import STAGES
from on_gpu.report import Done, Report
from on_gpu.supervised import Worker

LEAST = 8.0
"""Seconds below which no stage is started."""


@click.command()
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), required=True)
@click.option("--device", default="cuda", show_default=True)
@click.option("--quick", is_flag=True, help="A rehearsal on small sizes.")
@click.option("--minutes", default=9.0, show_default=True, help="For everything.")
@click.option("--stage", "wanted", multiple=True, help="Only this one; may be given several times.")
@click.option(
    "--cache",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Compiled kernels, as make gpu-cache leaves them.",
)
def main(
    output: Path,
    device: str,
    quick: bool,
    minutes: float,
    wanted: Sequence[str],
    cache: Path | None,
) -> None:
    """Run the GPU's tests and benchmarks, and leave their results in a folder.

    The status is 1 where a stage failed, or something that was measured is not as it must be.
    """
    end = time.monotonic() + 60 * minutes
    output = output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    if unknown := {*wanted} - {stage.name for stage in STAGES}:
        raise click.UsageError(f"no stage {', '.join(sorted(unknown))}")
    todo = [stage for stage in STAGES if not wanted or stage.name in wanted]
    for stage in STAGES:  # what is there afterwards is of this run
        for kind in ("json", "log"):
            (output / f"{stage.name}.{kind}").unlink(missing_ok=True)
    report, tables = Report(output), ""
    with tempfile.TemporaryDirectory() as fresh:
        if cache:
            kept.unpack(cache)
        os.environ |= {
            **kept.environment(kept.FOLDER if cache else Path(fresh)),
            "PYTHONPATH": os.pathsep.join(sys.path),
            "TRITON_INTERPRET": "1" if device == "cpu" else "0",
            "XQUANT_TEST_DEVICE": device,
        }
        worker = Worker(output, device, quick)
        for number, stage in enumerate(todo):
            start = time.monotonic()
            # What earlier stages did not need is for those that come. A rehearsal may be slow.
            later = 0 if quick else sum(each.seconds for each in todo[number + 1 :])
            seconds = min(max(end - start - later, stage.seconds), end - start)
            if seconds < LEAST:
                outcome = "no time was left"
            elif stage.apart:
                worker.close()
                command = COMMANDS[stage.name](output, device, quick)
                outcome = run(command, output / f"{stage.name}.log", seconds)
            else:
                outcome = worker.do(stage.name, seconds)
            report.done.append(Done(stage.name, outcome, time.monotonic() - start))
            click.echo(f"{stage.name}: {outcome}, {report.done[-1].seconds:.0f} s")
            tables = report.write()
        worker.close()
    click.echo(tables)
    raise SystemExit(0 if report.good else 1)


if __name__ == "__main__":
    main()
