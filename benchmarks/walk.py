"""The files of xquant that a decoded token enters, in their order: how far one has to read to follow it.

    python benchmarks/walk.py --json benchmarks/results/walk.json

One layer of a tiny model, past its first steps, in a `KVCache`, a `StaticKVCache` and an engine's layer. An
arrow leads from a file, or from the model, to another file of which it calls a function. A file is come back
to by every arrow but the first.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import xquant
from support.models import prompt, tiny
from support.paged_sequences import Engine, codec_of
from xquant import KVCache, StaticKVCache
from xquant.kernels import cpu
from xquant.results import stamp, write_json

SOURCES = Path(xquant.__file__).parent
SPEC = "kivi-4bit:group=32"


THE_MODEL = "the model"
Arrow = tuple[str, str]


def file_of(frame: FrameType | None) -> str:
    """The file of the innermost function of the package that runs."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCES):
            return str(path.relative_to(SOURCES))
        frame = frame.f_back
    return THE_MODEL


@contextmanager
def walked(arrows: dict[Arrow, int]) -> Iterator[None]:
    """Count the calls from file to file of the package."""

    def see(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and Path(frame.f_code.co_filename).is_relative_to(SOURCES):
            arrow = file_of(frame.f_back), file_of(frame)
            if arrow[0] != arrow[1]:
                arrows[arrow] = arrows.get(arrow, 0) + 1

    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)


def by_model(cache: Any, model: Any) -> Callable[[], Any]:
    def step() -> Any:
        return model(prompt(1, 1), past_key_values=cache)

    with torch.no_grad():
        model(prompt(1, 70), past_key_values=cache)
    return step


def by_engine(model: Any) -> Callable[[], Any]:
    engine = Engine(codec_of(model, SPEC), softcap=4.0, backend=cpu.best())
    engine.run({0: 70})
    return lambda: engine.run({0: 1})


@click.command()
@click.option("--json", "target", type=click.Path(path_type=Path))
@torch.no_grad()
def main(target: Path | None) -> None:
    model = tiny("llama", num_hidden_layers=1, head_dim=32, hidden_size=64)
    whole = tiny("llama", num_hidden_layers=3, head_dim=32, hidden_size=64)
    steps = {
        "KVCache": by_model(KVCache(model, SPEC), model),
        "StaticKVCache": by_model(StaticKVCache(model, SPEC, 128), model),
        "PagedPast": by_engine(whole),
    }
    rows = []
    for form, step in steps.items():
        for _ in range(3):
            step()
        arrows: dict[Arrow, int] = {}
        with walked(arrows):
            step()
        files = list(dict.fromkeys(file for _, file in arrows))
        row = {"form": form, "method": SPEC, "files": len(files), "arrows": len(arrows)}
        row |= {"come_back": len(arrows) - len(files), "calls": sum(arrows.values())}
        walk = [f"{start} -> {end}, {count}" for (start, end), count in arrows.items()]
        rows.append({**row, "walk": walk})
        click.echo(f"{form}: {len(files)} files, {row['come_back']} come back to")
        click.echo("\n".join(f"  {line}" for line in walk))
    if target is not None:
        write_json(target, stamp(rows))


if __name__ == "__main__":
    main()
