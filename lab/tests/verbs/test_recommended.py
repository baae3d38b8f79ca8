"""What verbs measure that are given no method."""

import pytest

from xquant.catalogue import RECOMMENDED, recommended

FULL = ("full",)
ASKED = {
    "perplexity m --text TEXT": ("on_text", recommended()),
    "compare m --text TEXT --output TMP": ("on_text", FULL + recommended()),
    "eval m --task passkey": ("eval", FULL + recommended()),
    "bench m": ("bench", recommended(decoding=True)),
}


@pytest.mark.parametrize("words", ASKED)
def test_it_is_the_one_list(run, text, tmp_path, monkeypatch, words):
    module, methods = ASKED[words]

    def asked_for(methods, files):
        raise ValueError(" ".join(method.spec for method in methods))

    monkeypatch.setattr(f"xquant_lab.verbs.{module}.calibrations_for", asked_for)
    arguments = [{"TEXT": text, "TMP": tmp_path}.get(word, word) for word in words.split()]
    assert run(*arguments) == (2, "", f"xquant: {' '.join(methods)}\n")


def test_plan_shows_all_of_it(run, model):
    out = run("plan", model, "--gpu", "l4", "--context", 100)[1]
    rows = out.partition("\nmethod ")[2].partition("\n\n")[0].splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["full", *(each.spec for each in RECOMMENDED)]
