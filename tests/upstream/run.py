"""Transformers' own generation tests, with a compressed cache in place of DynamicCache.

    python tests/upstream/run.py CHECKOUT                                 # all families and methods
    python tests/upstream/run.py CHECKOUT --family llama --method xquant-16bit:group=4
    python tests/upstream/run.py CHECKOUT --static --family llama --family qwen2 --family phi3

CHECKOUT is a checkout of transformers, of the version that is installed; its tests want ``parameterized`` and
``httpx``. A test counts where our cache was used in it; `substitute.LEFT_OUT` says which are not run, and
why. They ask whether a cache behaves like one, hardly what it holds: their models are tiny and their weights
small, so that a cache of one bit passes too.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from xquant.results import stamp, write_json

FAMILIES = [
    "arcee",
    "gemma",
    "gemma2",
    "gemma3",
    "granite",
    "llama",
    "mixtral",
    "olmo",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "smollm3",
    "starcoder2",
]
METHODS = ("kivi-16bit:group=4", "xquant-16bit:group=4", "tc-8bit:group=16", "kivi-4bit:group=4")
STATIC = ("kivi-16bit:group=32", "kivi-4bit:group=32")
ROOM = 256
"""Tokens of a sequence in a `StaticKVCache`."""
Outcome = dict[str, Any]


def file_of(family: str) -> str:
    """The tests of a family, in a checkout."""
    return f"tests/models/{family}/test_modeling_{family}.py"


def outcomes(checkout: Path, families: list[str], method: str, static: bool) -> dict[str, Outcome]:
    """What became of every test, by its name; ``static``: with a `StaticKVCache`.

    Raises:
        SystemExit: pytest could not run them; it has said why.
    """
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "outcomes.json")
        path = os.pathsep.join(filter(None, [str(here), os.environ.get("PYTHONPATH")]))
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "XQUANT_METHOD": method,
            "XQUANT_ROOM": str(ROOM if static else 0),
            "XQUANT_OUTCOMES": str(found),
            "HF_HUB_OFFLINE": "1",
        }
        options = "-p substitute -p no:cacheprovider -q --tb=line -W ignore -o log_cli=false"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options.split(), *map(file_of, families)],
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode not in (0, 1):  # 1: some failed
            raise SystemExit(f"pytest failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        loaded: dict[str, Outcome] = json.loads(found.read_text())
        return loaded


def counts(test: Outcome) -> bool:
    """Whether our cache was used in a test, or should have been."""
    return test["outcome"] == "failed" or (test["outcome"] == "passed" and test["caches"] > 0)


def passed(tests: Iterable[Outcome]) -> tuple[int, int]:
    """Tests that count and pass, and all that count."""
    found = Counter(test["outcome"] for test in tests if counts(test))
    return found["passed"], found.total()


def others(tests: Iterable[Outcome]) -> str:
    """What became of the rest."""
    found = Counter(test["outcome"] for test in tests if not counts(test))
    return ", ".join(f"{count} {kind}" for kind, count in sorted(found.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--family", action="append", help="a folder of tests/models; may be repeated")
    parser.add_argument("--method", action="append", help="a method's spec; may be repeated")
    parser.add_argument("--static", action="store_true", help="with a StaticKVCache")
    parser.add_argument("--json", help="a results file to write")
    parser.add_argument("--note", help="what it says of the checkout, such as its version")
    arguments = parser.parse_args()
    families = arguments.family or FAMILIES
    for family in families:
        if not (arguments.checkout / file_of(family)).is_file():
            parser.error(f"{arguments.checkout} has no {file_of(family)}")
    rows: list[dict[str, Any]] = []
    for method in arguments.method or (STATIC if arguments.static else METHODS):
        print(method, flush=True)
        tests = outcomes(arguments.checkout, families, method, arguments.static)
        for family in families:
            own = [test for name, test in tests.items() if name.startswith(file_of(family))]
            right, total = passed(own)
            print(f"  {family:12} {right:3} of {total:3}   without our cache: {others(own)}")
            rows.append(
                {
                    "method": method,
                    "family": family,
                    "static": arguments.static,
                    "passed": right,
                    "tests": total,
                }
            )
        right, total = passed(tests.values())
        print(f"  {'all':12} {right:3} of {total:3}", flush=True)
        for name, test in tests.items():
            if test["outcome"] == "failed":
                print(f"    {name.split('/')[2]} {name.rpartition('::')[2]}: {test['reason']}")
    if arguments.json:
        stamped = stamp(rows, checkout=arguments.note)
        for row in stamped:
            where = row["environment"]
            where["command"] = where["command"].replace(str(arguments.checkout), "CHECKOUT")
        write_json(arguments.json, stamped)


if __name__ == "__main__":
    main()
