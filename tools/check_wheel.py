"""Installs a wheel or a source distribution into an empty environment, and generates with it.

    python tools/check_wheel.py dist/xquant_kv-0.1.0-py3-none-any.whl

The file must be small and hold what it should. In the environment are torch, in the version of
constraints.txt, and what pip installs for the file, nothing else. There a tiny model generates with two
methods. A wheel that is named after a platform must use the native kernels. One that is named `any` must say
that it has none. pip makes one or the other of a source distribution: without a compiler if CXX=/bin/false.

It takes a minute or two, most of it for torch. pip is used as it is configured on this machine.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
LARGEST = 2_000_000
SDIST = ".tar.gz"
EXPECTED = {"src", "tests", "docs", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"}
EXPECTED |= {"CMakeLists.txt", "pyproject.toml", "PKG-INFO"}
ALLOWED = EXPECTED | {
    "benchmarks",
    "examples",
    "lab",
    "notebooks",
    "tools",
    "vllm-plugin",
    "mkdocs.yml",
}
ALLOWED |= {"conftest.py"}
"""What lies at the top of a source distribution."""
UNWANTED = (".pyc", ".so", ".pth", ".safetensors", ".gguf")

PROBE = """
import sys
import warnings
from importlib import metadata
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import xquant

installed = metadata.distribution("xquant-kv")
assert Path(xquant.__file__).is_relative_to(sys.prefix), xquant.__file__
assert installed.version == xquant.__version__
assert Path(xquant.__file__).with_name("py.typed").is_file()
tags = [line for line in installed.read_text("WHEEL").splitlines() if line.startswith("Tag: ")]
native = not all(tag.endswith("-any") for tag in tags)
print(*tags, sep=", ")
sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
ids = torch.arange(2, 102)[None]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for spec in ("kivi-4bit", "xquant-4bit"):
        cache = xquant.KVCache(model, spec)
        out = model.generate(ids, past_key_values=cache, max_new_tokens=64, do_sample=False)
        report = cache.report()
        print(f"{spec}: {report.kernel}, {report.cache_bytes:,} bytes")
        assert out.shape == (1, 164) and report.sealed_bytes
        assert report.kernel.startswith(("avx2", "avx512", "neon") if native else ("folded", "reference"))
said = [str(each.message) for each in caught if "xquant: " in str(each.message)]
print(*said, sep="\\n")
assert len(said) == (0 if native else 1), said
"""


def members(file: Path) -> list[str]:
    """The names of the files in it, of a source distribution without the folder that holds all of them."""
    if not file.name.endswith(SDIST):
        with zipfile.ZipFile(file) as wheel:
            return wheel.namelist()
    with tarfile.open(file) as sdist:
        return [name.partition("/")[2] for name in sdist.getnames()]


def wrong_with(file: Path) -> list[str]:
    """What is wrong with the file itself."""
    found = []
    if file.stat().st_size > LARGEST:
        found.append(f"{file.stat().st_size:,} bytes are more than {LARGEST:,}")
    names = members(file)
    unwanted = UNWANTED
    if file.name.endswith(SDIST):
        tops = {name.partition("/")[0] for name in names}
        found += [f"it holds {top}" for top in sorted(tops - ALLOWED)]
        found += [f"it lacks {top}" for top in sorted(EXPECTED - tops)]
    else:
        libraries = [name for name in names if name.endswith(".so")]
        if bool(libraries) == file.name.endswith("-any.whl"):
            found.append(f"its name does not fit its libraries: {libraries}")
        unwanted = tuple(end for end in UNWANTED if end != ".so")
    found += [f"it holds {name}" for name in names if name.endswith(unwanted)]
    return found + [f"it holds {name}" for name in names if "/." in f"/{name}"]


def check(file: Path) -> None:
    """Install it into an empty environment, and run PROBE there."""
    (torch,) = (line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory(prefix="check-wheel-") as folder:
        venv.create(Path(folder, "venv"), with_pip=True)
        python = str(Path(folder, "venv", "bin", "python"))
        pip = [python, "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for what in (torch, str(file.resolve())):
            subprocess.run([*pip, "-c", str(CONSTRAINTS), what], check=True, cwd=folder, env=clean)
        subprocess.run([python, "-I", "-c", PROBE], check=True, cwd=folder, env=clean)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="WHEEL_OR_SDIST")
    failed = 0
    for file in parser.parse_args().files:
        start = time.monotonic()
        print(f"{file.name}: {file.stat().st_size:,} bytes", flush=True)
        wrong = wrong_with(file)
        try:
            check(file)
        except subprocess.CalledProcessError as error:
            wrong.append(f"status {error.returncode} of {error.cmd[-1][:80].strip()!r}")
        for each in wrong:
            print(f"  WRONG: {each}")
        print(f"  {'failed' if wrong else 'good'}, {time.monotonic() - start:.0f} s", flush=True)
        failed += bool(wrong)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
