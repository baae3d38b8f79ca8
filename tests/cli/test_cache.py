"""`xquant cache`: what is kept on this machine, listed and removed."""

import json

import pytest

from support.rendered import WIDTHS, check_whole
from xquant.cli.cache import cache


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A folder as the package leaves it, with a file beside it that is not the package's."""
    sizes = {
        "smollm2-1-2/model": 3000,
        "calibrations/tc.safetensors": 500,
        "cuda/a.cubin": 70,
        "notes.txt": 1,
    }
    for name, size in sizes.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    monkeypatch.setenv("XQUANT_CACHE", str(tmp_path))
    return tmp_path


def test_it_is_listed_with_its_sizes(run, kept):
    status, out, err = run("cache")
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == f"3.57 KB in {kept}"
    rows = json.loads(run("cache", "--json", "-")[1])
    assert [(row["kind"], row["path"], row["bytes"], row["removed"]) for row in rows] == [
        ("models", "smollm2-1-2", 3000, False),
        ("calibrations", "calibrations/tc.safetensors", 500, False),
        ("kernels", "cuda/a.cubin", 70, False),
    ]


def test_what_is_named_is_removed_and_nothing_else(run, kept):
    status, out, err = run("cache", "--clear", "models", "--clear", "kernels")
    assert (status, err) == (0, "")
    assert out.count(" removed\n") == 2 and out.endswith(f"500 B in {kept}\n")
    left = sorted(str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file())
    assert left == ["calibrations/tc.safetensors", "notes.txt"]
    assert run("cache", "--clear", "all")[0] == 0
    assert [path.name for path in kept.rglob("*") if path.is_file()] == ["notes.txt"]
    assert run("cache") == (0, f"0 B in {kept}\n", "")


def test_an_unknown_kind_is_refused(run, kept):
    status, out, err = run("cache", "--clear", "everything")
    assert (status, out) == (2, "") and "'everything' is not one of" in err
    assert (kept / "cuda" / "a.cubin").exists()


@pytest.mark.parametrize("width", WIDTHS)
def test_names_are_whole_at_any_width(kept, width, capsys, monkeypatch):
    monkeypatch.chdir(kept)
    monkeypatch.setenv("XQUANT_CACHE", ".")
    check_whole(lambda: cache.callback((), None), width, capsys, monkeypatch)
