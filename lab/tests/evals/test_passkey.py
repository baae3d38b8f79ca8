import pytest
import torch

from support.models import tiny
from support.word_tokenizer import word_tokenizer
from xquant import Full, KVCache, parse_method
from xquant.runs import Runs
from xquant_lab.evals import passkey as module
from xquant_lab.evals.journal import Journal
from xquant_lab.evals.passkey import Prompts, passkey


class Letters:
    """A tokenizer of characters."""

    def __call__(self, text, **_):
        return {"input_ids": [ord(c) % 128 for c in text]}

    def decode(self, ids, **_):
        return "".join(chr(i) for i in ids)


class Reader(torch.nn.Module):
    """In the place of a model: reads the number out of the prompt where it is far enough up."""

    device = torch.device("cpu")

    def __init__(self, reach):
        super().__init__()
        self.reach = reach

    def generate(self, ids, max_new_tokens, **_):
        text = Letters().decode(ids[0].tolist())
        at = text.index("The pass key is ") + 16
        answer = f" {text[at : at + 5]}." if len(text) - at < self.reach else " 12345."
        assert len(answer) == max_new_tokens
        return torch.cat([ids, torch.tensor([[ord(c) for c in answer]])], 1)


@pytest.fixture
def reader(monkeypatch):
    monkeypatch.setattr(module, "_filled", lambda model, methods, *_: dict.fromkeys(methods))
    monkeypatch.setattr(module, "_likelihood", lambda *_: -1.0)
    monkeypatch.setattr(module, "check_context", lambda model, tokens: None)
    return Reader(500)


def test_what_is_found_is_counted_by_depth(reader):
    rows = passkey(reader, Letters(), ["full", "kivi-2bit"], Prompts([400, 800], [0.1, 0.9], 3))
    assert [(r.method, r.context, r.depth) for r in rows] == [
        (method, context, depth)
        for method in ("full", "kivi-2bit")
        for context in (400, 800)
        for depth in (0.1, 0.9)
    ]
    assert [row.found for row in rows] == [3, 3, 0, 3] * 2
    assert {row.samples for row in rows} == {3}


@pytest.mark.parametrize(
    ("limit", "counts"),
    [
        (1, {0.5: 1}),
        (2, {0.3: 1, 0.7: 1}),
        (7, {0.1: 1, 0.3: 2, 0.5: 1, 0.7: 2, 0.9: 1}),
        (20, dict.fromkeys(module.DEPTHS, 4)),
        (None, dict.fromkeys(module.DEPTHS, 4)),
    ],
)
def test_a_limit_is_of_all_prompts_of_a_context(reader, limit, counts):
    rows = passkey(reader, Letters(), ["full"], Prompts([400], limit=limit))
    assert {row.depth: row.samples for row in rows} == counts


@pytest.mark.parametrize("depth", [0.0, 0.25, 1.0])
def test_a_prompt_is_as_long_as_asked_and_hides_its_number_there(depth):
    prompts = list(module.prompts_of(Letters(), 900, depth, 2))
    assert len({key for key, _ in prompts}) == 2
    for key, ids in prompts:
        assert len(ids) + module._answer_tokens(Letters()) == 900
        text = Letters().decode(ids)
        assert text.startswith(module.OPENING) and text.endswith(module.QUESTION)
        needle = module.NEEDLE.format(key=key)
        before = text.index(needle) - len(module.OPENING)
        room = 900 - 7 - len(module.OPENING + module.QUESTION + needle)
        assert before == round(depth * room)
    assert prompts == list(module.prompts_of(Letters(), 900, depth, 2))


def test_a_stopped_run_goes_on(reader, tmp_path):
    prompts, journal = Prompts([400], [0.5], 2), Journal(Runs(tmp_path, {}))
    first = passkey(reader, Letters(), ["full"], prompts, journal=journal)
    reader.reach = 0  # it would find nothing now
    assert passkey(reader, Letters(), ["full"], prompts, journal=journal) == first


def test_real_caches_are_asked():
    model, seen = tiny("llama"), []
    methods = ["full", "kivi-4bit:group=8", "crosslayer:group=8,kq=2,vq=0,km=4,vm=2"]
    prompts, journal = Prompts([120], [0.5], 1), Journal(tell=lambda *now: seen.append(now))
    rows = passkey(model, word_tokenizer(), methods, prompts, journal=journal)
    assert [row.method for row in rows] == methods
    assert all(row.found == 0 for row in rows)  # it has no digits
    assert {row.attend for row in rows} == {"store"}
    assert seen[-1][:2] == (3, 3)


def test_prompts_can_be_read_exactly_as_in_generate():
    model, method = tiny("llama"), parse_method("kivi-2bit:group=8")
    ids = torch.arange(5, 65)[None]
    caches = {
        attend: module._filled(model, {method: None, Full(): None}, ids, attend)
        for attend in ("store", "chunk")
    }
    with torch.inference_mode():
        own = KVCache(model, method, kernel="reference")  # attends as caches that are read together do
        model(ids, past_key_values=own)
    stored, exact = (caches[attend][method].compressed for attend in ("store", "chunk"))
    for one, other, wanted in zip(stored, exact, own.compressed, strict=True):
        assert torch.equal(other.states()[0], wanted.states()[0])
        assert one is stored[0] or not torch.equal(one.states()[0], wanted.states()[0])


def test_the_likelihood_is_that_of_the_digits():
    model, right = tiny("llama"), [ord(c) % 128 for c in " 48"]
    ids = torch.arange(5, 25)[None]
    whole = torch.cat([ids, torch.tensor([right])], 1)
    with torch.inference_mode():
        found = model(whole).logits[0].log_softmax(-1)
        model(ids[:, :-1], past_key_values=(cache := KVCache(model, "full")))
        own = module._likelihood(model, Letters(), cache, ids[:, -1:], right)
    wanted = found[20, right[1]] + found[21, right[2]]  # the blank before them does not count
    assert own == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"methods": []}, "no method"),
        ({"prompts": Prompts([513], [0.5], 1)}, "past the model's 512 positions"),
        ({"prompts": Prompts([20], [0.5], 1)}, "too short: the question needs"),
        ({"prompts": Prompts([100], [1.5], 1)}, "between 0"),
        ({"prompts": Prompts([100], [0.5], 0)}, "at least 1"),
        ({"attend": "both"}, "not one of chunk, store"),
    ],
)
def test_what_cannot_be_asked_is_refused(asked, message):
    given = {"methods": ["full"], "prompts": Prompts([100], [0.5], 1)} | asked
    with pytest.raises(ValueError, match=message):
        passkey(tiny("llama"), word_tokenizer(), **given)
