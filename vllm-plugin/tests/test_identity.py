"""Whose blocks an engine reads: of configurations, without an engine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")


from support.vllm_engines import configured, connector, save_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def identity(folder: Path, store: Path, spec: str = "kivi-4bit", **options: Any) -> bytes:
    """Of an engine with these options, which stores in full."""
    from xquant_vllm.checks import connector_options_of
    from xquant_vllm.identity import of_engine

    options |= connector(store, method="full")
    config = configured(folder, additional_config={"xquant": spec}, **options)
    found = connector_options_of(config)
    assert found is not None
    return of_engine(config, found)


def test_engines_that_compute_otherwise_do_not_read_each_other(tiny: Path, tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
    others: list[dict[str, Any]] = [
        {"hf_overrides": {"rope_parameters": rope}},
        {"hf_overrides": {"rms_norm_eps": 1e-3}},
        {"dtype": "float32"},
        {"quantization": "fp8"},
        {"load_format": "dummy"},
        {"load_format": "dummy", "seed": 1},
        {"spec": "kivi-2bit"},
        {"tensor_parallel_size": 2},
    ]
    found = [identity(tiny, tmp_path, **other) for other in ({}, *others)]
    assert len(set(found)) == len(found)
    for same in ({}, {"max_model_len": 512}, {"max_num_seqs": 3}, {"seed": 1}, {"enforce_eager": True}):
        assert identity(tiny, tmp_path, **same) == found[0]


@pytest.mark.parametrize("part", ["mlp.up_proj", "self_attn.q_proj", "self_attn.o_proj", "input_layernorm"])
def test_a_fine_tuned_model_is_another(part: str, tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny)
    model.save_pretrained(tmp_path / "same")
    assert identity(tmp_path / "same", tmp_path) == identity(tiny, tmp_path)
    with torch.no_grad():
        model.get_submodule(f"model.layers.1.{part}").weight.flatten()[0] += 1
    model.save_pretrained(tmp_path / "tuned")
    assert identity(tmp_path / "tuned", tmp_path) != identity(tiny, tmp_path)


def test_an_adapter_is_known_by_what_is_in_its_files(tmp_path: Path) -> None:
    from xquant_vllm.identity import Adapters

    def asked(number: int, name: str, again: bool = False) -> Any:
        return SimpleNamespace(lora_int_id=number, lora_path=str(tmp_path / name), load_inplace=again)

    for name, content in (("one", "a"), ("same", "a"), ("other", "b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_text(content)
    adapters = Adapters()
    one, same, other = (adapters.digest(asked(*each)) for each in ((1, "one"), (2, "same"), (3, "other")))
    assert one == same != other and one and adapters.digest(None) == b""
    assert adapters.digest(asked(4, "not-there")) is None
    (tmp_path / "one" / "adapter_model.safetensors").write_text("b")
    assert adapters.digest(asked(1, "one")) == one  # vLLM goes on with what it loaded
    assert adapters.digest(asked(1, "one", again=True)) == other == adapters.digest(asked(5, "one"))
