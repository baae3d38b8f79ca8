"""What needs no torch is answered without it, in an instant."""

import json
import subprocess
import sys

import pytest

ASKED = {
    "": (0, "Usage: xquant"),
    "--help": (0, "Usage: xquant"),
    "--version": (0, "xquant "),
    "methods": (0, "kvquant-3bit-1%"),
    "methods --json -": (0, '"needs_calibration": true'),
    "methods --help": (0, "List the methods"),
    "bench --help": (0, "--resume DIR"),
    "nonsense": (2, "No such command 'nonsense'"),
    "generate m --prompt w2 --nonsense": (2, "No such option '--nonsense'"),
    "generate m --prompt w2 --method nonsense": (2, "unknown method 'nonsense'; known are full, "),
    "generate m --prompt w2 --method kivi2bit": (2, "'kivi2bit' is not how kivi is written"),
    "generate m --prompt w2 --method xquant-9bit": (2, "bits=9 is not one of 1, 2, 3"),
    "perplexity m --method kivi-2bit:tale=1 --text t": (2, "kivi has no option 'tale=1'"),
    "generate m --prompt w2 --calibration NONE": (2, "does not exist"),
    "generate m --prompt w2 --temperature nan": (2, "a temperature of nan"),
    "generate ./nowhere --prompt w2": (2, "there is no model folder './nowhere'"),
    "generate . --prompt w2": (2, "is not a model folder: it has no config.json"),
    "perplexity m --method nonsense --text t": (2, "unknown method 'nonsense'"),
    "perplexity m --method full --text NONE": (2, "there is no text file"),
    "perplexity m --method full --text t --context 0": (2, "0 is not in the range"),
    "generate m --prompt w2 --method kiwi-4bit": (2, "did you mean 'kivi-4bit'?"),
    "generate m --prompt w2 --method tccl-2bit": (2, "did you mean 'tc-cl-2bit'?"),
    "generate m --prompt w2 --method kivi-4bit:tale=1": (2, "did you mean 'tail'?"),
    "lm-eval --help": (0, "pip install './lab[eval]'"),
    "perplexity m --text NONE": (2, "there is no text file"),
    "eval m": (2, "no task to run"),
    "perplexity m --method full --text t --json NONE/r": (2, "there is no folder"),
    "compare m --method kivi-4bit --method xquantum-2bit --output o": (
        2,
        "unknown method 'xquantum",
    ),
    "compare m --output o --against NONE": (2, "does not exist"),
    "compare m --output o --bench NONE": (2, "does not exist"),
    "eval m --method full --task gsm8k --data NONE": (2, "does not exist"),
    "bench m --method nonsense": (2, "unknown method 'nonsense'"),
    "bench": (2, "give either MODEL or --shape NAME"),
    "calibrate m --method nonsense --output o": (2, "unknown method 'nonsense'"),
    "calibrate m --method kivi-4bit --output o --text NONE": (2, "kivi-4bit needs no calibration"),
    "calibrate m --method kvquant-3bit-1% --output o --text NONE": (2, "there is no text file"),
    "plan m --gpu nonsense": (2, "no GPU 'nonsense' in the table"),
    "plan m --gpu l4 --method nonsense": (2, "unknown method 'nonsense'"),
    "reproduce xquant/table99 m": (2, "there is no experiment 'xquant/table99'"),
    "reproduce": (2, "--list shows the experiments"),
    "reproduce xquant/table1 m --text NONE": (2, "there is no text file"),
}
PROGRAM = """
import contextlib, io, json, sys
for name in ("torch", "transformers", "lm_eval"):
    sys.modules[name] = None  # importing them fails
from xquant.cli import main

answers = {}
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = main(words.split())
    answers[words] = status, out.getvalue(), err.getvalue()
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What a process without torch answers to `ASKED`: (status, stdout, stderr) of each."""
    folder = tmp_path_factory.mktemp("empty")
    asked = json.dumps([words.replace("NONE", "nowhere/file") for words in ASKED])
    command = [sys.executable, "-c", PROGRAM, asked]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir())
    return json.loads(done.stdout)


@pytest.mark.parametrize("words", ASKED)
def test_it_is_answered_without_torch(answers, words):
    status, message = ASKED[words]
    got, out, err = answers[words.replace("NONE", "nowhere/file")]
    assert got == status
    if status == 0:
        assert message in out and err == ""
    else:
        assert message in err and out == ""
        assert err.startswith("xquant: ") and err.count("\n") == 1
