"""Whether a change computes anything differently: digests of what every method packs, reads and generates.

    python benchmarks/digests.py keep     # before the change
    python benchmarks/digests.py compare  # after it: what differs, and an error if anything does

Digests are of what users can reach: saved files, logits, tokens, the keys and values that layers show, an
engine's pages, the files of a store (`digested/`). Models are the tests' tiny families, with small heads
(torch's kernels) and with heads that the native and the Triton kernels read, and SmolLM2. They hold for one
machine and one set of libraries, as `results/digests.json` names them.
"""

import json
import os
import re
import sys
from itertools import chain
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import click
import torch
from digested import growing, served, static, stored
from digested.common import Found

from support.triton_interpreter import mend
from xquant.results import environment

FILE = Path(__file__).parent / "results" / "digests.json"


def all_digests(only: str) -> dict[str, Found]:
    """Of the cases whose names match ``only``."""
    digests = {}
    forms = growing.tiny_cases, static.cases, served.cases, stored.cases, growing.smollm2_cases
    for name, find in chain.from_iterable(form() for form in forms):
        if re.search(only, name):
            digests[name] = find()
            click.echo(f"{name}: {' '.join(digests[name].values())}", err=True)
    return digests


@click.command()
@click.argument("action", type=click.Choice(["keep", "compare"]))
@click.option("--only", default="", help="Cases whose names match this regular expression.")
def main(action: str, only: str) -> None:
    torch.set_num_threads(2)
    mend()
    now = all_digests(only)
    if action == "keep":
        kept = {"environment": environment(), "digests": now}
        FILE.write_text(json.dumps(kept, indent=1) + "\n")
        return
    before = json.loads(FILE.read_text())["digests"]
    different = [name for name, digest in now.items() if before.get(name) != digest]
    for name in different:
        click.echo(f"{name}: {before.get(name)} before, {now[name]} now")
    click.echo(f"{len(now) - len(different)} of {len(now)} cases are the same")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
