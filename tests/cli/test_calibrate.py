import json

import pytest

from support.word_tokenizer import text_of
from xquant import Calibration
from xquant.calibrators import writing
from xquant.catalogue import recommended
from xquant.cli.common import chosen

SPEC = "kvquant-2bit-1%"
SMALL = ("--context", 40, "--windows", 2, "--device", "cpu")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "t.txt"
    path.write_text(text_of(100))
    return str(path)


@pytest.fixture
def artifact(run, model, text, tmp_path):
    made = tmp_path / "c.safetensors"
    asked = ("calibrate", model, "--method", SPEC, "--text", text, *SMALL, "--output", made)
    status, out, err = run(*asked, "--json", "-")
    (row,) = json.loads(out)
    assert (status, err) == (0, "")
    assert (row["method"], row["output"], row["tokens"]) == (SPEC, str(made), 80)
    assert row["calibration_text"].startswith("t.txt, sha256 ")
    return made


def test_an_artifact_serves_every_verb(run, model, text, artifact, tmp_path):
    given = ("--calibration", artifact)
    status, out, err = run(
        "perplexity", model, "--method", SPEC + ":tail=3", "--method", "full", "--text", text,
        *SMALL, *given, "--json", "-",
    )  # fmt: skip
    rows = json.loads(out)
    assert (status, err) == (0, "")
    assert [row["method"] for row in rows] == [SPEC + ":tail=3", "full"]
    assert list(rows[0]["calibrations"]) == [SPEC]
    status, out, err = run(
        "generate", model, "--method", SPEC, "--prompt", "w3 w4", "--max-new-tokens", 3, *given
    )
    assert (status, err) == (0, "")
    assert SPEC in out
    output = ("--output", tmp_path / "out")
    status, out, err = run("compare", model, "--method", SPEC, "--text", text, *SMALL, *given, *output)
    assert (status, err) == (0, "")
    rows = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["method"] for row in rows] == ["full", SPEC]
    assert chosen((), [str(artifact)]) == (*recommended(), SPEC)


def test_without_a_text_the_model_writes_one(run, model, tmp_path):
    asked = ("calibrate", model, "--method", SPEC, "--context", 20, "--windows", 3)
    made = [tmp_path / name for name in ("a", "b", "c")]
    for seed, output in zip((0, 0, 1), made, strict=True):
        status, out, err = run(*asked, "--seed", seed, "--device", "cpu", "--output", output)
        assert (status, err) == (0, "")
        assert f"generated (seed {seed})" in out
    texts = [Calibration.load(path).text for path in made]
    assert texts[0] == texts[1]
    assert texts[0].split(",")[1] != texts[2].split(",")[1]


def content(file):
    """The header of a safetensors file, whose metadata is in another order every time, and its bytes."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def test_a_stopped_calibration_goes_on_and_ends_with_the_same_bytes(run, model, tmp_path, monkeypatch):
    asked = (
        "calibrate",
        model,
        "--method",
        SPEC,
        "--context",
        20,
        "--windows",
        5,
        "--device",
        "cpu",
    )
    monkeypatch.setattr(writing, "TOKENS_AT_ONCE", 40)  # two of the five texts
    straight, resumed, other = (tmp_path / name for name in ("straight", "resumed", "other"))
    assert run(*asked, "--output", straight)[0] == 0
    write, written = writing._continued, []

    def stop_at_the_last(model, openings, *rest):
        if len(openings) == 1:
            raise KeyboardInterrupt
        return write(model, openings, *rest)

    def watched(model, openings, *rest):
        written.append(len(openings))
        return write(model, openings, *rest)

    kept = ("--resume", tmp_path / "kept")
    monkeypatch.setattr(writing, "_continued", stop_at_the_last)
    status, out, err = run(*asked, *kept, "--output", resumed)
    assert (status, out) == (130, "") and f"goes on from what is finished in '{kept[1]}'" in err
    assert not resumed.exists()
    monkeypatch.setattr(writing, "_continued", watched)
    assert run(*asked, *kept, "--output", resumed)[0] == 0
    assert written == [1] and content(resumed) == content(straight)
    # Another method uses the text, another seed writes its own.
    assert run(*asked[:3], "kvquant-3bit-1%", *asked[4:], *kept, "--output", other)[0] == 0
    assert written == [1] and Calibration.load(other).text == Calibration.load(straight).text
    assert run(*asked, "--seed", 1, *kept, "--output", other)[0] == 0
    assert written == [1, 2, 2, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("calibrate MODEL --method SPEC --text TEXT", "Missing option '--output'"),
        ("calibrate MODEL --text TEXT --output OUT", "Missing option '--method'"),
        ("calibrate MODEL --method kivi-2bit --output OUT", "kivi-2bit needs no calibration"),
        ("calibrate MODEL --method SPEC --text NONE --output OUT", "there is no text file"),
        ("calibrate MODEL --method SPEC --text TEXT --output OUT", "past the model's 512"),
        (
            "calibrate MODEL --method SPEC --text TEXT --context 101 --output OUT",
            "holds 100 tokens",
        ),
        ("calibrate MODEL --method SPEC --text TEXT --context 60 --output OUT", "holds 1 window"),
        (
            "calibrate MODEL --method SPEC --context 600 --output OUT",
            "past the model's 512 positions",
        ),
        ("calibrate MODEL --method SPEC --windows 0 --output OUT", "0 is not in the range"),
        ("calibrate MODEL --method SPEC --output NONE/c", "there is no folder"),
        ("calibrate MODEL --method SPEC --output OUT --resume TEXT", "is not a folder"),
        ("calibrate MODEL --method SPEC --text TEXT --output OUT --resume NONE", "nothing to keep"),
        ("calibrate MODEL --method SPEC --output -", "not to standard output"),
        ("calibrate MODEL --method kvquant-2bit-20% --output OUT", "outliers=20 is above 10"),
        (
            "calibrate MODEL --method SPEC --text TEXT --context 2 --windows 1 --output OUT",
            "too short",
        ),
        ("perplexity MODEL --method SPEC --text TEXT", "needs a calibration: 'xquant calibrate"),
        ("generate MODEL --method SPEC --prompt w3", "needs a calibration: 'xquant calibrate"),
        ("generate MODEL --method SPEC --prompt w3 --calibration NONE", "does not exist"),
        ("generate MODEL --method SPEC --prompt w3 --calibration TEXT", "no calibration file ("),
        (
            "generate MODEL --prompt w3 --calibration MADE",
            "for kvquant-2bit-1%, which is not among",
        ),
        (
            "generate MODEL --method SPEC --prompt w3 --calibration MADE --calibration MADE",
            "two calibrations are for kvquant-2bit-1%",
        ),
        ("generate MODEL --method crosslayer:kq=30 --prompt w3", "kq=30 but 5 layers"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(run, model, text, artifact, tmp_path, arguments, message):
    out_file = tmp_path / "out.safetensors"
    names = {
        "MODEL": model, "TEXT": text, "SPEC": SPEC, "OUT": out_file, "MADE": artifact,
        "NONE": tmp_path / "none",
    }  # fmt: skip
    words = [str(names.get(word, word)).replace("NONE", str(names["NONE"])) for word in arguments.split()]
    status, out, err = run(*words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.safetensors"]
