"""What shells are told of how a command goes on."""

import pytest

from xquant.cli.app import COMPLETE


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("xquant pla", {"plain,plan"}),
        ("xquant plan --pa", {"plain,--past-positions"}),
        ("xquant plan m --wi", {"plain,--wide"}),
        ("xquant generate m --method kivi", {"plain,kivi-4bit", "plain,kivi-2bit"}),
        ("xquant generate smol", {"plain,smollm2", "plain,smollm2-mha", "dir,smol"}),
        ("xquant plan --gpu rtx-40", {"plain,rtx-4090"}),
        ("xquant plan --shape llama-3.1", {"plain,llama-3.1-8b"}),
        ("xquant bench --shape llama-3.1", {"plain,llama-3.1-8b"}),
        ("xquant methods --json o", {"file,o"}),
        ("xquant compare m --output o", {"dir,o"}),
    ],
)
def test_words_are_completed(run, monkeypatch, words, offered):
    monkeypatch.setenv(COMPLETE, "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    status, out, err = run()
    assert (status, err) == (0, "")
    assert set(out.split()) == offered


def test_a_shell_is_given_what_to_run(run, monkeypatch):
    monkeypatch.setenv(COMPLETE, "zsh_source")
    out = run()[1]
    assert "#compdef xquant" in out and f"{COMPLETE}=zsh_complete" in out
