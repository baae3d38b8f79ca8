"""`xquant prompt`, `xquant generate --prompt-cache` and `xquant inspect`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.models import prompt, tiny
from support.word_tokenizer import text_of
from xquant import KVCache, load_model
from xquant.cli.prompt import CHUNK, fill

SPEC = "kivi-4bit:sink=2,group=8"


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    """A prompt of 100 words, saved with `SPEC`: (file, row)."""
    from xquant.cli import main

    folder = tmp_path_factory.mktemp("saved")
    (folder / "t.txt").write_text(text_of(100))
    asked = ["prompt", model, "--method", SPEC, "--text", str(folder / "t.txt"), "--device", "cpu"]
    asked += ["--output", str(folder / "c"), "--json", str(folder / "row.json")]
    assert main(asked) == 0
    return folder / "c", json.loads((folder / "row.json").read_text())[0]


def written(run, *asked):
    status, out, err = run(*asked, "--device", "cpu", "--max-new-tokens", 9, "--json", "-")
    assert (status, err) == (0, ""), err
    return json.loads(out)[0]


def test_prompt_saves_a_cache_and_says_its_size(run, model, saved, tmp_path):
    file, row = saved
    assert (row["method"], row["tokens"], row["output"]) == (SPEC, 100, str(file))
    assert row["file_bytes"] == file.stat().st_size
    assert row["report"]["tokens"] == 100 and row["cache_bytes"] < row["full_cache_bytes"]
    cache = KVCache.load(load_model(model)[0], file)
    assert cache.saved_tokens is not None and cache.saved_tokens[0, :3].tolist() == [2, 3, 6]
    asked = ("prompt", model, "--prompt", "w2 w3", "--output", tmp_path / "c", "--device", "cpu")
    status, out, err = run(*asked)
    assert (status, err) == (0, "")
    assert out.startswith(f"{tmp_path / 'c'}: ") and "2 tokens with kivi-4bit" in out


def test_generate_goes_on_from_it_as_a_cache_that_was_never_saved_does(run, model, saved):
    file, _ = saved
    network, tokenizer = load_model(model)
    cache, ids = KVCache(network, SPEC), tokenizer(text_of(100), return_tensors="pt").input_ids
    with torch.inference_mode():
        network(ids, past_key_values=cache)
    ids = torch.cat([ids, torch.tensor([[17, 4, 9]])], 1)
    given = {"attention_mask": torch.ones_like(ids), "past_key_values": cache}
    tokens = network.generate(ids, max_new_tokens=9, do_sample=False, **given)
    want = tokenizer.decode(tokens[0, 103:])
    asked = ("generate", model, "--prompt-cache", file, "--prompt", "w17 w4 w9")
    row = written(run, *asked)
    assert row["text"] == want and row["prompt_cache"] == str(file)
    assert row["method"] == SPEC and row["report"]["tokens"] == 111
    assert written(run, *asked, "--method", SPEC)["text"] == want
    other = written(run, *asked, "--method", "int8:group=8")
    assert other["method"] == other["report"]["method"] == "int8:group=8"
    assert other["report"]["tokens"] == 111
    status, out, err = run(*asked, "--device", "cpu", "--max-new-tokens", 9)
    assert (status, err) == (0, "") and out.startswith(row["text"])


def test_a_prompt_is_read_in_chunks():
    model = tiny("llama", max_position_embeddings=2 * CHUNK)
    ids, steps = prompt(1, CHUNK + 40), []
    cache, other = (KVCache(model, "kivi-4bit:group=8") for _ in range(2))
    fill(cache, ids, lambda *step: steps.append(step[:2]))
    with torch.inference_mode():
        for part in ids.split(CHUNK, 1):
            model(part, past_key_values=other)
    assert steps == [(CHUNK, CHUNK + 40), (CHUNK + 40, CHUNK + 40)]
    for ours, theirs in zip(cache.compressed, other.compressed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours.states(), theirs.states(), strict=True))


def test_inspect_tells_what_the_header_says(run, saved):
    file, row = saved
    status, out, err = run("inspect", file)
    assert (status, err) == (0, "")
    for words in (str(file), SPEC, "100 tokens x 1, with ids", "LlamaForCausalLM in float32"):
        assert words in out
    status, out, err = run("inspect", file, "--json", "-")
    assert (status, err) == (0, "")
    (told,) = json.loads(out)
    assert sum(told["bytes"].values()) == told["file_bytes"] == file.stat().st_size
    assert (told["method"], told["tokens"], told["batch"]) == (SPEC, 100, 1)
    assert (told["cache_bytes"], told["full_cache_bytes"]) == (
        row["cache_bytes"],
        row["full_cache_bytes"],
    )
    assert told["has_tokens"] and told["bytes"]["ids"] == 400
    assert {"codes", "scale", "zero", "tail", "sinks", "index", "header"} <= told["bytes"].keys()


def test_inspect_of_an_empty_cache_and_of_windows(run, tmp_path):
    cache = KVCache(tiny("gemma3"), "kivi-4bit:group=8")
    cache.save(tmp_path / "c")
    status, out, _ = run("inspect", tmp_path / "c")
    assert status == 0 and "0 tokens x 0, without ids" in out
    with torch.inference_mode():
        cache.attachment.view.model(prompt(2, 30), past_key_values=cache)
    cache.save(tmp_path / "c")
    told = json.loads(run("inspect", tmp_path / "c", "--json", "-")[1])[0]
    assert told["bytes"]["layers not compressed"] == 2 * 2 * 2 * 2 * 15 * 16 * 4


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None  # importing them fails
from xquant.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("inspect FILE", 0, "100 tokens x 1, with ids"),
        ("inspect FILE --json -", 0, '"tokens": 100'),
        ("generate m --prompt-cache MISSING --prompt w2", 2, "there is no saved cache"),
        ("generate m --prompt-cache TEXT --prompt w2", 2, "is damaged or no saved cache"),
        ("generate m --prompt-cache FILE --prompt w2 --chat", 2, "--chat writes a turn"),
        ("generate m --prompt-cache FILE --prompt w2 --dtype bfloat16", 2, "give --dtype float32"),
    ],
)
def test_without_torch(saved, words, status, message):
    file, _ = saved
    names = {"FILE": file, "MISSING": "missing", "TEXT": file.parent / "t.txt"}
    asked = [str(names.get(word, word)) for word in words.split()]
    command = [sys.executable, "-c", WITHOUT_TORCH, *asked]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    said = done.stdout if status == 0 else done.stderr
    assert message in said and (status == 0 or said.count("\n") == 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("prompt MODEL --output OUT", "give either --text FILE or --prompt TEXT"),
        ("prompt MODEL --output OUT --text a --prompt b", "give either --text FILE or --prompt TEXT"),
        ("prompt MODEL --prompt w2", "Missing option '--output'"),
        ("prompt MODEL --output - --prompt w2", "not to standard output"),
        ("prompt MODEL --output NONE/c --prompt w2", "there is no folder"),
        ("prompt MODEL --output OUT --text NONE", "there is no text file"),
        ("prompt MODEL --output OUT --prompt w2 --method nonsense", "unknown method"),
        ("prompt MODEL --output OUT --prompt LONG", "past the model's 512 positions"),
        ("generate MODEL --prompt-cache FILE --prompt w2 --method xquant-4bit", "cannot be converted"),
        ("generate MODEL --prompt-cache FILE --prompt w2 --max-new-tokens 412", "a context of 513"),
        ("generate OTHER --prompt-cache FILE --prompt w2", "saved from another model"),
        ("generate MODEL --prompt-cache TWO --prompt w2", "holds 2 sequences"),
        ("generate MODEL --prompt-cache BARE --prompt w2", "no ids of tokens"),
        ("inspect NONE", "there is no saved cache"),
        ("inspect TEXT", "is damaged or no saved cache"),
        ("inspect", "Missing argument 'FILE'"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(run, model, saved, tmp_path, words, message):
    file, _ = saved
    network = load_model(model)[0]
    names = {"MODEL": model, "OUT": tmp_path / "out", "FILE": file, "TEXT": file.parent / "t.txt"}
    if "TWO" in words or "BARE" in words:
        cache = KVCache(network, "kivi-4bit:group=8")
        ids = prompt(2 if "TWO" in words else 1)
        network(ids, past_key_values=cache)
        cache.save(tmp_path / "more", ids if "TWO" in words else None)
        names |= {"TWO": tmp_path / "more", "BARE": tmp_path / "more"}
    if "OTHER" in words:
        tiny("qwen2").save_pretrained(tmp_path / "other")
        for part in Path(model).glob("token*"):
            (tmp_path / "other" / part.name).write_bytes(part.read_bytes())
        names["OTHER"] = tmp_path / "other"
    names |= {"LONG": text_of(600), "NONE": tmp_path / "none", "NONE/c": tmp_path / "none" / "c"}
    status, out, err = run(*(names.get(word, word) for word in words.split()))
    assert (status, out) == (2, "")
    assert message in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_file_in_a_folder_that_cannot_be_written_to_is_refused_before_anything_is_read(
    run, monkeypatch, tmp_path
):
    """Also one that is there and can be written: what replaces it is made beside it."""
    (tmp_path / "there").touch()
    monkeypatch.setattr("xquant.cli.common.os.access", lambda path, mode: path != tmp_path)
    monkeypatch.setattr("xquant.load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    for name in ("there", "new"):
        status, out, err = run("prompt", "m", "--prompt", "w2", "--output", tmp_path / name)
        assert (status, out) == (2, "") and "permission denied" in err
