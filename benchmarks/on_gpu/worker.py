"""The process that measures: it does stages one by one, as it is told, and keeps its models between them."""

import os
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from .plan import QUICK, WHOLE


def serve(pipe: Connection, output: Path, device: str, quick: bool) -> None:
    """Do what comes through the pipe, a stage and the seconds for it, until None comes; answer with what
    became of each."""
    # What takes time is imported here, by this process alone.
    import torch

    from xquant.results import stamp, write_json

    from . import correct, steps, sweep, timed
    from .machine import Machine, Row

    if device == "cpu":
        from . import rehearsal

        rehearsal.take_for_a_gpu()
    jobs = {
        "ceilings": timed.limits,
        "correct": correct.correct,
        "attention": timed.attention,
        "steps": steps.steps,
        "sweep": sweep.sweep,
        "others": timed.others,
        "sealing": timed.sealing,
        "largest": timed.largest,
    }
    machine = Machine(device, QUICK if quick else WHOLE)
    torch.set_num_threads(min(torch.get_num_threads(), os.cpu_count() or 1))

    def do(name: str, seconds: float) -> str:
        start, rows = time.monotonic(), list[Row]()
        for found in jobs[name](machine):
            taken = time.monotonic() - start
            for row in found:
                print(f"{taken:6.1f} s  {name}: {shown(row)}", flush=True)
            rows += found
            write_json(output / f"{name}.json", stamp(rows, model=machine.sizes.shape))
            if taken > seconds:
                return f"cut short after {taken:.0f} s"
        return "done"

    while (asked := pipe.recv()) is not None:
        try:
            outcome = do(*asked)
        except Exception as error:  # the next stage may go better
            traceback.print_exc()
            outcome = f"failed: {type(error).__name__}: {error}"[:300]
        machine.fresh()
        pipe.send(outcome)


def shown(row: dict[str, object]) -> str:
    """A row in the log: what is short."""
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
        if isinstance(value, float | int | str | bool) and value != ""
    )
