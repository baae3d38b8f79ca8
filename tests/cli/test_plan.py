"""`xquant plan`: its rows, its tables, and what it refuses."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.caches import calibration
from support.models import tiny
from xquant.analysis.activations import Activations
from xquant.analysis.gpus import GPU, GPUS
from xquant.analysis.memory import CacheLayout
from xquant.analysis.plan import plan
from xquant.analysis.shapes import Skeleton, shape_config
from xquant.cli.plan import advice
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


def test_an_engine_is_planned_for(run) -> None:
    asked = (
        "plan",
        "--shape",
        "smollm2",
        "--engine",
        "vllm",
        "--memory",
        0.5,
        "--dtype",
        "bfloat16",
    )
    asked += ("--method", "kivi-4bit", "--method", "crosslayer")
    status, out, err = run(*asked, "--json", "-")
    own, full, kivi, crosslayer = json.loads(out)
    assert (status, err) == (0, "")
    blocks = int(5e8) // (30 * 98304)  # of 128 tokens; a request of 8,192 has 64
    assert own["tokens"] == int(blocks / 64 * 8192)
    assert full["tokens"] < own["tokens"] < kivi["tokens"] / 3.4
    assert "layers share codes" in crosslayer["refused"]
    status, out, err = run(*asked)
    assert (status, err) == (0, "") and "layers share codes" in out
    assert f"{kivi['tokens']:,}" in next(li for li in out.splitlines() if li.startswith("kivi-4bit"))


@pytest.mark.parametrize(
    ("written", "taken"),
    [("float32", "bfloat16"), ("float16", "float16"), ("bfloat16", "bfloat16"), (None, "bfloat16")],
)
def test_an_engine_takes_16_bits(written, taken, run, tmp_path) -> None:
    """As vLLM does where it is not told a dtype: a checkpoint in float32 has no more room for it."""
    config = tiny("llama").config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": written}))
    asked = ("plan", tmp_path, "--engine", "vllm", "--memory", 0.1, "--method", "kivi-4bit", "--json", "-")
    rows, stated = (json.loads(run(*asked, *more)[1]) for more in ((), ("--dtype", taken)))
    assert rows == stated and rows[0]["dtype"] == taken
    wide = json.loads(run(*asked, "--dtype", "float32")[1])
    assert wide[0]["tokens"] == pytest.approx(rows[0]["tokens"] / 2, rel=1e-2)


def test_what_an_engine_holds_depends_on_shards_and_drafts(run) -> None:
    asked = ("plan", "--shape", "smollm2", "--engine", "vllm", "--memory", 0.5, "--json", "-")

    def tokens(*more) -> list[int]:
        status, out, _ = run(*asked, "--method", "kivi-4bit", *more)
        assert status == 0
        return [row["tokens"] for row in json.loads(out)]

    whole, parts, guessing = tokens(), tokens("--shards", 3), tokens("--drafts", 128)
    assert all(2.8 * a < b < 3.1 * a for a, b in zip(whole, parts, strict=True))
    assert guessing[0] == whole[0] and guessing[2] < whole[2]
    status, out, err = run(*asked, "--shards", 2)
    assert (status, out) == (2, "") and "3 key/value heads cannot be divided by 2" in err
    status, out, err = run("plan", "--shape", "smollm2", "--gpu", "l4", "--drafts", 2)
    assert (status, out) == (2, "") and "are for --engine" in err


def test_an_engine_is_planned_for_with_a_calibration(run, model, tmp_path) -> None:
    spec, file = "kvquant-3bit-1%", str(tmp_path / "made.safetensors")
    made = calibration(AutoModelForCausalLM.from_pretrained(model), spec)
    assert made is not None
    made.save(file)
    asked = ("plan", model, "--engine", "vllm", "--memory", 0.1, "--method", spec, "--json", "-")
    status, out, _ = run(*asked)
    assert status == 0 and "xquant_calibration=FILE" in json.loads(out)[2]["refused"]
    status, out, _ = run(*asked, "--calibration", file)
    assert status == 0 and json.loads(out)[2]["tokens"] > json.loads(out)[1]["tokens"]
    asked = ("plan", "--shape", "smollm2", "--engine", "vllm", "--memory", 0.1, "--json", "-")
    status, out, _ = run(*asked, "--method", spec, "--calibration", file)
    assert status == 0 and "a shape has none" in json.loads(out)[2]["refused"]


@pytest.mark.parametrize("given", [(), ("--engine", "vllm"), ("--gpu", "l4", "--memory", 1)])
def test_a_gpu_or_an_engine_is_asked_for(run, given) -> None:
    status, out, err = run("plan", "--shape", "smollm2", *given)
    assert (status, out) == (2, "") and "either --gpu NAME or --engine vllm" in err


def test_a_shape_is_planned_for_without_weights(run) -> None:
    asked = ("plan", "--shape", "llama-3.1-8b", "--gpu", "H100 PCIe", "--context", 1 << 20)
    status, out, err = run(*asked)
    assert (status, out) == (2, "") and "past the model's 131072 positions" in err
    status, out, err = run(*asked, "--past-positions")
    assert (status, err) == (0, "")
    for words in ("8.03 billion parameters", "131,072 positions", "378 FLOPs a byte", "~"):
        assert words in out
    table = out[: out.index("\nTake")] if "\nTake" in out else out[: out.index("\nNone fits")]
    for spec in ("full", "kivi-4bit", "kvquant-3bit-1%", "tc-2bit", "tc-cl-2bit"):
        assert sum(line.startswith(f"{spec} ") for line in table.splitlines()) == 2
    full = next(line for line in out.splitlines() if line.startswith("full"))
    assert "no" in full.split()  # 137 GB of cache


@pytest.mark.parametrize("spec", ["full", "kivi-2bit:group=32", "xquant-2bit", "kvquant-2bit-1%"])
@pytest.mark.parametrize("batch", [1, 7])
def test_the_largest_are_the_last_that_fit(spec: str, batch: int) -> None:
    skeleton = Skeleton(tiny("gemma2").config, torch.bfloat16)
    layout, gpu = CacheLayout(skeleton, parse_method(spec)), GPUS["rtx-3090"]
    (row,) = plan([layout], gpu, 1000, batch, 256, past_positions=True)
    room = gpu.memory - row["weights_bytes"] - row["codec_bytes"]
    longest, most = row["max_context"], row["max_batch"]
    active = Activations(layout)

    def needed(context: int, sequences: int) -> int:
        passes = active.prefill(context, sequences, 256), active.decode(context, sequences)
        return layout.peak(context, sequences) + max(passes)

    assert needed(longest, batch) <= room < needed(longest + 1, batch)
    assert needed(1000, most) <= room < needed(1000, most + 1)
    assert row["fits"] and longest > 1000 and most > batch
    (beyond,) = plan([layout], gpu, longest + 1, batch, 256, past_positions=True)
    assert not beyond["fits"] and beyond["max_batch"] < batch


def test_the_longest_context_is_within_the_positions() -> None:
    skeleton = Skeleton(tiny("llama").config, torch.bfloat16)
    asked = ([CacheLayout(skeleton, parse_method("kivi-2bit"))], GPUS["l4"], 100, 1, 64)
    (row,), (past,) = plan(*asked), plan(*asked, past_positions=True)
    assert row["max_context"] == skeleton.positions == 512
    assert row["max_context_in_memory"] == past["max_context"] == past["max_context_in_memory"] > 512


ROOMY, TIGHT = GPUS["h200"], GPU(20e9, 1e12, 1e14)


@pytest.mark.parametrize(
    ("gpu", "specs", "taken"),
    [
        (ROOMY, "kivi-2bit full xquant-4bit", "full"),
        (TIGHT, "full kivi-2bit xquant-4bit kivi-4bit", "kivi-4bit"),
        (TIGHT, "full kivi-2bit xquant-4bit", "xquant-4bit"),
        (TIGHT, "full kvquant-4bit kivi-4bit", "kivi-4bit"),
        (TIGHT, "full", None),
        (GPU(1e9, 1e12, 1e14), "full kivi-2bit", None),
    ],
)
def test_one_method_is_to_be_taken(gpu: GPU, specs: str, taken: str | None) -> None:
    skeleton = Skeleton(shape_config("llama-3.1-8b"), torch.bfloat16)
    layouts = [CacheLayout(skeleton, parse_method(spec)) for spec in specs.split()]
    rows = plan(layouts, gpu, 32768, 1, 512)
    assert [row["method"] for row in rows if row["take"]] == ([] if taken is None else [taken])
    said = advice(rows)
    assert said.startswith("None fits" if taken is None else f"Take {taken}")
    assert said.count("\n") == 0


def test_nothing_fits_where_the_weights_do_not(run) -> None:
    asked = ("plan", "--shape", "llama-65b", "--gpu", "l4", "--method", "xquant-2bit")
    status, out, _ = run(*asked, "--json", "-")
    assert status == 0
    assert {row["context"] for row in json.loads(out)} == {2048}  # all its positions
    for row in json.loads(out):
        assert (row["fits"], row["max_context"], row["max_batch"]) == (False, 0, 0)
    assert "None fits: not one token" in run(*asked)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("plan MODEL", "give either --gpu NAME or --engine vllm"),
        ("plan --gpu l4", "give either MODEL or --shape"),
        ("plan MODEL --shape llama-7b --gpu l4", "give either MODEL or --shape"),
        ("plan MODEL --gpu h900", "no GPU 'h900' in the table: one of a100-40gb"),
        ("plan MODEL --gpu rtx4900", "; did you mean 'rtx-4090'?"),
        ("plan --shape llama-9 --gpu l4", "no shape 'llama-9': one of llama-7b"),
        ("plan --shape qwen3-32 --gpu l4", "; did you mean 'qwen3-32b'?"),
        ("plan TMP --gpu l4", "it has no config.json, and a folder that holds only config.json is enough"),
        ("plan MODEL --engine vllm --memory 1 --weights-bits 4", "--weights-bits is for --gpu"),
        ("plan MODEL --gpu l4 --weights-bits 1", "1.0 is not in the range"),
        ("plan NONE --gpu l4", "no model folder"),
        ("plan MODEL --gpu l4 --context 513", "past the model's 512 positions"),
        ("plan --shape tiny --gpu l4 --context 4097", "past the model's 4096 positions: --past"),
        ("plan MODEL --gpu l4 --context 9 --chunk 0", "0 is not in the range"),
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
