import pytest
import torch

from support.models import tiny
from support.word_tokenizer import text_of, word_tokenizer
from xquant_lab.reproduce import kvquant_weights as module
from xquant_lab.reproduce.experiments import EXPERIMENTS
from xquant_lab.reproduce.setup import Setup
from xquant_lab.reproduce.weights import linear_weights, weight_bits

EXPERIMENT = EXPERIMENTS["kvquant/table5"]


@pytest.fixture(autouse=True)
def rounded(monkeypatch):
    """Weights rounded to steps in the place of k-means, and how often."""
    calls = []

    def quantize(weights, fisher, bits, done):
        calls.append(bits)
        assert fisher.keys() == weights.keys()
        step = 2.0**-bits
        return {name: (w.detach() / step).round().mul(step).half() for name, w in weights.items()}

    monkeypatch.setattr(module, "quantize_weights", quantize)
    return calls


def make(**more):
    size = {"context": 24, "windows": 1, "calibration_windows": 2}
    return Setup(tiny("llama"), word_tokenizer(), text_of(60), **size, **more)


def run(setup):
    return EXPERIMENT.run(setup, EXPERIMENT.printed)


def test_ratios_are_to_full_weights_and_the_full_cache():
    setup = make(calibration_text=text_of(60))
    before = {name: p.clone() for name, p in setup.model.named_parameters()}
    rows = run(setup)
    assert [row["row"] for row in rows] == [row["row"] for row in EXPERIMENT.printed]
    full, narrow = rows[0]["perplexity"], rows[3]
    assert rows[0]["ratio"] == 1
    assert narrow["ratio"] == narrow["perplexity"] / full != 1
    assert narrow["paper"]["ratio"]["LLaMA-7B, WikiText-2"] == round(6.13 / 5.68, 4)
    assert rows[4]["paper"]["cache_ratio"]["all models, most"] == round(3.33 / 16, 4)
    weights = linear_weights(setup.model).values()
    widths = [row["weight_bits"] for row in rows]
    assert widths == [16, *[weight_bits(weights, 4)] * 2, *[weight_bits(weights, 3)] * 2]
    assert all(torch.equal(p, before[name]) for name, p in setup.model.named_parameters())


def test_the_cache_is_calibrated_on_the_model_it_is_measured_on(monkeypatch):
    made = []
    calibrate = Setup.calibrated

    def calibrated(self, methods):
        found = calibrate(self, methods)
        made.append((self.model, [each.method for each in found]))
        return found

    monkeypatch.setattr(Setup, "calibrated", calibrated)
    setup = make()
    run(setup)
    assert [methods for _, methods in made] == [[], ["kvquant-4bit-1%"], ["kvquant-3bit-1%"]]
    assert made[0][0] is setup.model
    assert len({id(model) for model, _ in made}) == 3


def test_without_a_text_one_that_the_model_writes_is_for_all(monkeypatch):
    written = []
    own = Setup.samples.func
    monkeypatch.setattr(Setup.samples, "func", lambda self: written.append(self.model) or own(self))
    setup = make()
    run(setup)
    assert written == [setup.model]


def test_a_stopped_run_goes_on_with_its_weights(tmp_path, monkeypatch, rounded):
    given = {"resume": tmp_path, "calibration_text": text_of(60)}
    first = run(make(**given))
    assert rounded == [4, 3]
    assert len(list(tmp_path.glob("weights-*.safetensors"))) == 2
    monkeypatch.setattr(module, "collect_weights", None)
    monkeypatch.setattr("xquant_lab.reproduce.setup.calibrate_together", None)
    assert run(make(**given)) == first


def test_damaged_weights_are_made_anew(tmp_path, rounded, capsys):
    given = {"resume": tmp_path, "calibration_text": text_of(60)}
    first = run(make(**given))
    (file,) = tmp_path.glob("weights-3bit-*")
    file.write_bytes(file.read_bytes()[:-1])
    assert run(make(**given)) == first
    assert rounded == [4, 3, 3]
    said = f"xquant: '{file}' is not what was written there: it is made anew\n"
    assert capsys.readouterr().err == said
