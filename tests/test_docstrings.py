"""The examples in the docstrings of the public names print what they say.

An example finds ``model`` and ``tokenizer`` (a tiny llama and a tokenizer of words), ``inputs`` (a short
prompt) and ``prompt`` (one of 300 tokens), and runs in an empty folder.
"""

import doctest
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import xquant
from support.called import as_called
from support.models import tiny
from support.word_tokenizer import text_of, word_tokenizer

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
WITHOUT = {"Report"}  # shown where KVCache.report is


def examples(name: str) -> list[doctest.DocTest]:
    found = doctest.DocTestFinder().find(getattr(xquant, name), name)
    return [test for test in found if test.examples]


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XQUANT_CACHE", str(tmp_path / "kept"))
    torch.manual_seed(0)
    tokenizer = word_tokenizer()
    tokenizer.model_max_length = 512
    short, long = (tokenizer(text_of(count), return_tensors="pt") for count in (5, 300))
    return {"model": tiny("llama"), "tokenizer": tokenizer, "inputs": short, "prompt": long}


@pytest.mark.parametrize("name", [name for name in xquant.__all__ if name not in WITHOUT])
def test_examples_print_what_they_say(name: str, names: dict[str, Any]) -> None:
    tests = examples(name)
    assert tests, f"xquant.{name} has no example"
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for test in tests:
        test.globs.update(names)
        for example in test.examples:
            example.source = as_called(example.source)
        report: list[str] = []
        runner.run(test, out=report.append)
        assert runner.failures == 0, "".join(report)


@pytest.mark.parametrize("name", xquant.__all__)
def test_every_public_name_says_what_it_is(name: str) -> None:
    assert inspect.getdoc(getattr(xquant, name))
