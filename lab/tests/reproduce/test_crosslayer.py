import pytest
import torch
from transformers import DynamicCache

from support.models import tiny
from support.word_tokenizer import text_of, word_tokenizer
from xquant import KVCache, parse_method
from xquant.methods import CrossLayer
from xquant.methods.key_value import flat_heads
from xquant.quant.affine import quantize
from xquant_lab.reproduce import crosslayer
from xquant_lab.reproduce.crosslayer import (
    at_depth,
    codes,
    figure2,
    figure3,
    shares,
    table3,
    widths,
)
from xquant_lab.reproduce.experiments import EXPERIMENTS
from xquant_lab.reproduce.setup import Setup

TABLES = [f"crosslayer/table{n}" for n in range(1, 9)]
POST = "rope=post"


def make(**changes):
    return Setup(tiny("llama", **changes), word_tokenizer(), text_of(120), context=36, windows=2)


@pytest.mark.parametrize(
    ("spec", "depth", "there"),
    [
        ("crosslayer:kq=30,vq=2,km=32,vm=16", 32, "crosslayer:kq=30,vq=2,km=32,vm=16"),
        ("crosslayer:kq=30,vq=2,km=32,vm=16", 30, "crosslayer:kq=28,vq=2,km=30,vm=16"),
        ("crosslayer:kq=30,vq=2,km=32,vm=16", 64, "crosslayer:kq=60,vq=4,km=64,vm=32"),
        ("crosslayer:kq=30,vq=2,km=32,vm=16", 5, "crosslayer:kq=4,vq=0,km=5,vm=2"),
        ("crosslayer:kq=30,vq=2,km=32,vm=16", 1, "crosslayer:kq=0,vq=0,km=1,vm=0"),
        (
            "crosslayer:kq=32,vq=32,km=32,vm=12,span=3",
            30,
            "crosslayer:kq=30,vq=30,km=30,vm=12,span=3",
        ),
        ("asymkv:lk=24,lv=32", 30, "asymkv:lk=22,lv=30"),
        ("asymkv-1.375bit", 30, "asymkv-1.375bit"),
        ("kivi-2bit", 30, "kivi-2bit"),
    ],
)
def test_layers_are_as_far_up_in_a_model_of_another_depth(spec, depth, there):
    assert at_depth(spec, depth) == there


@pytest.mark.parametrize("depth", [1, 2, 3, 5, 7, 24, 30, 40])
def test_every_setting_fits_every_depth(depth):
    for name in TABLES:
        for row in EXPERIMENTS[name].printed:
            if row.get("method", "").startswith("crosslayer"):
                parse_method(at_depth(row["method"], depth)).bounds(depth)


@pytest.mark.parametrize("name", TABLES)
def test_codes_have_the_printed_bits_on_a_model_of_the_papers_depth(name):
    setup = make(num_hidden_layers=32)
    for row in EXPERIMENTS[name].printed:
        if "method" in row and row["method"] != "full":
            for printed in row["paper"].get("code_bits", {}).values():
                assert widths(setup, row["method"])["code_bits"] == pytest.approx(printed, abs=0.007)


def test_ranges_take_bits_too():
    setup = make(num_hidden_layers=32, hidden_size=128)
    found = widths(setup, f"kivi-2bit:tail=128,group=32,{POST}")
    assert found == {"code_bits": 2.0, "bits_per_value": 3.0}


def test_settings_of_tables_2_and_3_are_those_of_table_9():
    def preset(name, method):
        values = CrossLayer.presets[name]
        assert parse_method(method) == CrossLayer(**values, rope="post")

    models = {"Mistral-7B-v0.3": "mistral-7b-v0.3", "Llama-2-7B": "llama2-7b"}
    for row in EXPERIMENTS["crosslayer/table2"].printed:
        if row["row"] == "XQuant":
            (model,) = row["paper"]["score"]
            preset(f"{models[model]}-truthfulqa", row["method"])
    lower, upper = {}, {}
    lower["Mistral"], upper["Mistral"] = "mistral-7b-v0.3", "mistral-7b-instruct-v0.2"
    lower["Llama"], upper["Llama"] = "llama2-7b", "llama2-7b-chat"
    for row in EXPERIMENTS["crosslayer/table3"].printed:
        if row["row"].startswith("XQuant") and row["task"] != "average":
            model = row["row"].removeprefix("XQuant, ").partition("'")[0]
            task = row["task"].removeprefix("longbench_").replace("_", "-")
            base = lower if task in ("hotpotqa", "2wikimqa", "musique") else upper
            preset(f"{base[model]}-{task}", row["method"])


def test_each_task_of_table_3_has_its_own_setting_and_averages_are_over_them(monkeypatch):
    ran = []

    def scores(setup, printed, metric, scale):
        assert len({row["task"] for row in printed}) == 1
        ran.extend(row["method"] for row in printed)
        return [
            {**row, "score": len(row["task"]), "agreement": 1.0, "same_tokens": 9, "kl": 0.5}
            for row in printed
        ]

    monkeypatch.setattr(crosslayer, "scores", scores)
    printed = EXPERIMENTS["crosslayer/table3"].printed
    rows = table3(make(), printed)
    assert len(rows) == len(printed)
    own = [row for row in rows if row["row"] == "XQuant, Llama's settings"]
    *tasks, average = own
    assert average["task"] == "average"
    assert average["score"] == sum(row["score"] for row in tasks) / 7
    assert average["paper"]["score"] == {"Llama-2-7B-Chat": 36.51}
    assert tasks[0]["method"] == f"crosslayer:kq=28,vq=0,km=32,vm=28,{POST}"
    assert tasks[0]["run_as"] == f"crosslayer:kq=4,vq=0,km=5,vm=4,{POST}"
    assert set(ran) == {row["run_as"] for row in rows if row["task"] != "average"}


def test_codes_are_those_of_the_keys_and_values():
    model = tiny("llama", hidden_size=64)
    ids = torch.arange(2, 34)[None]
    cache, exact = KVCache(model, f"kivi-2bit:group=8,{POST}"), DynamicCache(config=model.config)
    with torch.inference_mode():
        model(ids, past_key_values=cache)
        model(ids, past_key_values=exact)
    for layer, plain in zip(cache.compressed, exact.layers, strict=True):
        for state, states, dim in (("key", plain.keys, -2), ("value", plain.values, -1)):
            expected, _, _ = quantize(flat_heads(states)[0], 2, dim, 8)
            found = codes(layer)[state].flatten(0, 1)
            assert (found == expected).float().mean() > 0.999  # rounding may go either way


def test_shares_are_by_difference():
    joint = torch.tensor([[4, 1, 0, 1], [2, 0, 0, 0], [0, 0, 0, 2], [0, 0, 0, 0]]) / 10
    found = shares(joint)
    assert [found[f"delta{d}"] for d in range(4)] == pytest.approx([0.4, 0.5, 0, 0.1])
    assert found["within_one"] == pytest.approx(0.9)
    assert found["one_bit"] == pytest.approx(0.9)


def test_what_the_paper_reads_from_figure_2_chance_gives_too():
    x = torch.randn(2, 500, 32, generator=torch.Generator().manual_seed(0))
    lower, upper = quantize(x, 2, -1, 32)[0].long()
    found = shares((4 * lower + upper).flatten().bincount(minlength=16).view(4, 4) / lower.numel())
    assert found["within_one"] > 0.8
    assert found["delta3"] < 0.05
    assert found["one_bit"] == pytest.approx(0.5, abs=0.02)


def test_figure_2_is_of_every_layer_but_the_lowest():
    rows = figure2(make(), [])
    assert [(row["layer"], row["state"]) for row in rows] == [
        (layer, state) for layer in (1, 2, 3, 4) for state in ("key", "value")
    ]
    for row in rows:
        assert sum(row[f"delta{d}"] for d in range(4)) == pytest.approx(1)
        assert 0 < row["chance_one_bit"] < 1


def test_equal_layers_have_equal_codes(monkeypatch):
    same = {"key": torch.tensor([[[0, 1, 2, 3]]]), "value": torch.tensor([[[0, 0, 0, 3]]])}
    monkeypatch.setattr(crosslayer, "codes", lambda layer: same)
    for row in figure2(make(), []):
        assert row["within_one"] == row["one_bit"] == row["delta0"] == 1
    assert row["chance_within_one"] == row["chance_one_bit"] == pytest.approx(10 / 16)


def test_figure_3_reads_prompts_and_writes_an_eighth_of_them():
    rows = figure3(make(), [])
    assert [row["method"] for row in rows] == list(crosslayer.TIMED)
    assert {(row["batch"], row["prompt"], row["new"]) for row in rows} == {(2, 32, 4)}
    assert rows[0]["times_full"] == 1
    assert all(row["seconds"] > 0 for row in rows)
