import pytest
import torch
from transformers import DynamicCache

from support.models import tiny
from support.word_tokenizer import text_of, word_tokenizer
from xquant_lab.reproduce.setup import Setup
from xquant_lab.reproduce.states import layers, magnitudes, similarity, watch
from xquant_lab.reproduce.xquant import outlier_channels


@pytest.fixture(scope="module")
def setup():
    return Setup(tiny("llama"), word_tokenizer(), text_of(60), context=24, windows=2)


def test_what_is_seen_gives_the_values_of_the_model(setup):
    seen = {}
    watch(setup, lambda view, x: seen.setdefault(view.index, []).append(view.project(x)[1]))
    cache = DynamicCache(config=setup.model.config)
    with torch.inference_mode():
        setup.model(setup.ids, past_key_values=cache)
    assert list(seen) == [0, 1, 2, 3, 4]
    for index, values in seen.items():
        model = cache.layers[index].values.transpose(1, 2).flatten(2)
        torch.testing.assert_close(torch.stack(values), model)


def test_hooks_are_taken_off_where_the_looking_fails(setup):
    def fail(view, x):
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        watch(setup, fail)
    assert setup.model(setup.ids, use_cache=False).logits.isfinite().all()


def test_similarity_is_of_a_layer_and_the_one_below(setup):
    rows = similarity(setup, lambda view, x: {"grows": (view.index + 1) * torch.ones(4, 3), "turns": x})
    grows = [row for row in rows if row["state"] == "grows"]
    assert [row["layer"] for row in grows] == [1, 2, 3, 4]
    assert [row["cosine"] for row in grows] == pytest.approx([1] * 4)
    assert [row["difference"] for row in grows] == pytest.approx([1 / 2, 1 / 3, 1 / 4, 1 / 5])
    turns = [row for row in rows if row["state"] == "turns"]
    assert all(abs(row["cosine"]) < 0.99 for row in turns)


def test_magnitudes_find_the_channel_of_the_outliers(setup):
    rows = magnitudes(setup, lambda view, x: {"state": torch.tensor([[1.0, -9.0, 2.0], [3, 7, 2]])})
    assert [(row["layer"], row["largest"]) for row in rows] == [(n, 1) for n in range(5)]
    assert rows[0]["times_median"] == 4
    assert rows[0]["magnitudes"] == [2, 8, 2]
    assert [row["layer"] for row in rows if "magnitudes" in row] == [0, 2, 4]


def test_outlier_channels_are_those_of_the_strongest_direction(setup):
    model = tiny("llama")
    view = layers(Setup(model, None))[1]
    strong = torch.zeros(view.kv_width)
    strong[[5, 2, 7]] = torch.tensor([3.0, -8.0, 5.0])
    with torch.no_grad():
        view.key_module.weight.mul_(0.01).add_(torch.outer(strong, torch.ones(view.hidden)))
    assert outlier_channels(view)[:3] == [2, 7, 5]
