"""A calibration is announced before it begins, and what it has written is not lost when it is stopped."""

import pytest

from xquant import calibration_store
from xquant.calibrators import writing


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XQUANT_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr("xquant.methods.Transform.calibration_size", (40, 2))
    return tmp_path / "kept"


def test_it_says_for_what_how_long_once_and_where(run, model, folder, tmp_path):
    asked = ("prompt", model, "--method", "tc-2bit:group=16", "--prompt", "word " * 20, "--device", "cpu")
    status, _, err = run(*asked, "--output", tmp_path / "first")
    assert status == 0
    announced = err.partition("\n")[0]
    for part in ("tc-2bit must know this model", "80 tokens", "about", "once a model", str(folder)):
        assert part in announced, (part, err)
    assert not calibration_store.unfinished().exists() or not any(calibration_store.unfinished().iterdir())
    status, _, err = run(*asked, "--output", tmp_path / "second")
    assert status == 0 and "must know" not in err


def test_a_stopped_one_goes_on_without_being_asked_to(run, model, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "LENGTH", 20)
    monkeypatch.setattr(writing, "TOKENS_AT_ONCE", 40)  # two of the four texts
    write, written = writing._continued, []

    def stop_at_the_second(model, openings, *rest):
        if written:
            raise KeyboardInterrupt
        written.append(len(openings))
        return write(model, openings, *rest)

    def watched(model, openings, *rest):
        written.append(len(openings))
        return write(model, openings, *rest)

    asked = ("prompt", model, "--method", "tc-2bit:group=16", "--prompt", "word " * 20, "--device", "cpu")
    monkeypatch.setattr(writing, "_continued", stop_at_the_second)
    assert run(*asked, "--output", tmp_path / "out")[0] == 130
    monkeypatch.setattr(writing, "_continued", watched)
    assert run(*asked, "--output", tmp_path / "out")[0] == 0
    assert written == [2, 2]
