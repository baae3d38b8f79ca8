"""The main job on a small packaged model, in minutes: what `make demo` runs.

It times a token beside other caches and engines, as far as these are installed, calibrates on a text that the
model writes itself, compares the methods, generates with and without compression, and goes on from a prompt
that was saved. Each stage is a command of `xquant`, printed as it is run, with the time that it took.
"""

import shlex
import subprocess
import sys
import time
from pathlib import Path

import click

XQUANT = Path(sys.executable).with_name("xquant")
PAGE = "docs/choose.md"
STORY = "Write a long story about a lighthouse keeper and a storm."


def stages(output: Path) -> list[tuple[str, str]]:
    """What each stage does, and its command."""
    kvquant, tc, tc_cl = (output / f"{name}.safetensors" for name in ("kvquant", "tc", "tc-cl"))
    saved = output / "prompt.safetensors"
    sample = f"--context 192 --windows 12 --resume {output}/text"
    story = f"--chat --prompt {shlex.quote(STORY)} --max-new-tokens 120"
    return [
        (
            "Time a token after 2,048, weights in 4 bits, compiled, beside what else is installed",
            "xquant bench smollm2 --method kivi-4bit --peers --static --compile --weights-bits 4"
            f" --dtype bfloat16 --context 2048 --rounds 5 --json {output}/speed.json",
        ),
        (
            "Calibrate kvquant on a text that the model writes itself",
            f"xquant calibrate smollm2 --method kvquant-3bit-1% {sample} --output {kvquant}",
        ),
        (
            "Calibrate tc on the same text",
            f"xquant calibrate smollm2 --method tc-2bit {sample} --output {tc}",
        ),
        (
            "Calibrate tc-cl on the same text",
            f"xquant calibrate smollm2 --method tc-cl-2bit {sample} --output {tc_cl}",
        ),
        (
            "Compare the methods: a table, a picture and a page",
            "xquant compare smollm2 --context 768 --windows 2"
            f" --calibration {kvquant} --calibration {tc} --calibration {tc_cl} --output {output}",
        ),
        ("Write a text with the full cache", f"xquant generate smollm2 --method full {story}"),
        ("Write it with 4 bits", f"xquant generate smollm2 --method kivi-4bit {story}"),
        (
            "Read a page of the documentation, and save its cache in 2 bits",
            f"xquant prompt smollm2 --method tc-cl-2bit --text {PAGE} --calibration {tc_cl} --output {saved}",
        ),
        (
            "Load it as kivi-4bit, and go on",
            f"xquant generate smollm2 --prompt-cache {saved} --calibration {tc_cl}"
            " --method kivi-4bit --prompt 'In one sentence, this page says that' --max-new-tokens 60",
        ),
    ]


@click.command()
@click.argument("output", type=click.Path(path_type=Path), default=Path("build/demo"))
def main(output: Path) -> None:
    """Run all stages; files go to OUTPUT."""
    output.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    todo = stages(output)
    for number, (what, command) in enumerate(todo, 1):
        click.secho(f"\n{number}/{len(todo)}  {what}", bold=True)
        click.secho(f"$ {command}", dim=True)
        started = time.perf_counter()
        if subprocess.run([XQUANT, *shlex.split(command)[1:]]).returncode:
            sys.exit(f"stage {number} failed")
        click.secho(f"took {time.perf_counter() - started:.0f} s", dim=True)
    click.secho(f"\nAll in {time.perf_counter() - began:.0f} s. The page: {output}/report.html", bold=True)


if __name__ == "__main__":
    main()
