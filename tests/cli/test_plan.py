"""`xquant plan`: its rows, its tables, and what it refuses."""

import json

import pytest
import torch

from models import tiny
from xquant.analysis.gpus import GPUS
from xquant.analysis.memory import CacheLayout
from xquant.analysis.plan import plan
from xquant.analysis.shapes import Skeleton
from xquant.spec import parse_method

CONTRACT = {"method", "cache_bytes", "fits", "max_context", "max_batch"}


def test_a_row_for_the_full_cache_and_for_every_method(run, model) -> None:
    asked = ("plan", model, "--gpu", "l4", "--context", 100, "--batch", 3, "--method", "kivi-2bit")
    asked += ("--method", "kvquant-3bit-1%", "--method", "full")
    status, out, err = run(*asked, "--json", "-")
    rows = json.loads(out)
    assert (status, err) == (0, "")
    assert [row["method"] for row in rows] == ["full", "kivi-2bit", "kvquant-3bit-1%"]
    for row in rows:
        assert set(row) >= CONTRACT
        assert (row["gpu"], row["model"], row["dtype"]) == ("l4", model, "float32")
        assert (row["context"], row["batch"], row["fits"]) == (100, 3, True)
        assert row["cache_bytes"] == sum(row["parts"].values())
    assert [row["estimated"] for row in rows] == [False, False, True]


def test_a_shape_is_planned_for_without_weights(run) -> None:
    asked = ("plan", "--shape", "llama-3.1-8b", "--gpu", "H100 PCIe", "--context", 1 << 20)
    status, out, err = run(*asked)
    assert (status, err) == (0, "")
    for words in ("8.03 billion parameters", "131,072 positions", "378 FLOPs a byte", "~"):
        assert words in out
    for spec in ("full", "kivi-4bit", "kvquant-3bit-1%", "xquant-cl-2bit"):
        assert out.count(f"{spec} ") == 2
    full = next(line for line in out.splitlines() if line.startswith("full"))
    assert "no" in full.split()  # 137 GB of cache


@pytest.mark.parametrize("spec", ["full", "kivi-2bit:group=32", "xquant-2bit", "kvquant-2bit-1%"])
@pytest.mark.parametrize("batch", [1, 7])
def test_the_largest_are_the_last_that_fit(spec: str, batch: int) -> None:
    skeleton = Skeleton(tiny("gemma2").config, torch.bfloat16)
    layout, gpu = CacheLayout(skeleton, parse_method(spec)), GPUS["rtx-3090"]
    (row,) = plan(skeleton, [layout.method], gpu, 1000, batch)
    room = gpu.memory - row["weights_bytes"] - row["codec_bytes"]
    longest, most = row["max_context"], row["max_batch"]
    assert layout.peak(longest, batch) <= room < layout.count(longest + 1, batch).total
    assert layout.peak(1000, most) <= room < layout.peak(1000, most + 1)
    assert row["fits"] and longest > 1000 and most > batch
    (beyond,) = plan(skeleton, [layout.method], gpu, longest + 1, batch)
    assert not beyond["fits"] and beyond["max_batch"] < batch


def test_nothing_fits_where_the_weights_do_not(run) -> None:
    asked = ("plan", "--shape", "llama-65b", "--gpu", "l4", "--method", "xquant-2bit")
    status, out, _ = run(*asked, "--json", "-")
    assert status == 0
    for row in json.loads(out):
        assert (row["fits"], row["max_context"], row["max_batch"]) == (False, 0, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("plan MODEL", "Missing option '--gpu'"),
        ("plan --gpu l4", "give either MODEL or --shape"),
        ("plan MODEL --shape llama-7b --gpu l4", "give either MODEL or --shape"),
        ("plan MODEL --gpu h900", "no GPU 'h900' in the table: one of a100-40gb"),
        ("plan --shape llama-9 --gpu l4", "no shape 'llama-9': one of llama-7b"),
        ("plan TMP --gpu l4", "it has no config.json"),
        ("plan NONE --gpu l4", "no model folder"),
        ("plan MODEL --gpu l4 --context 513", "past the model's 512 positions"),
        ("plan MODEL --gpu l4 --context 0", "0 is not in the range"),
        ("plan MODEL --gpu l4 --context 9 --batch 0", "0 is not in the range"),
        ("plan MODEL --gpu l4 --context 9 --method nonsense", "unknown method 'nonsense'"),
        ("plan MODEL --gpu l4 --context 9 --method asymkv:lk=9,lv=0", "lk=9 but 5 layers"),
        ("plan MODEL --gpu l4 --context 9 --json NONE/r.json", "there is no folder"),
    ],
)
def test_bad_input_is_one_line(run, model, tmp_path, arguments: str, message: str) -> None:
    places = {"MODEL": model, "TMP": str(tmp_path), "NONE": str(tmp_path / "none")}
    words = []
    for word in arguments.split():
        head, slash, rest = word.partition("/")
        words.append(places.get(head, head) + slash + rest)
    status, out, err = run(*words)
    assert (status, out) == (2, "")
    assert message in err and err.count("\n") == 1
