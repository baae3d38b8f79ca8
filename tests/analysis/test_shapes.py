"""Known shapes, configurations by name and models without weights."""

import json

import pytest
import torch
from transformers import LlamaConfig, MambaConfig, T5Config

from support.models import COMMON, FAMILIES, tiny
from xquant.analysis.shapes import SHAPES, Skeleton, load_config, shape_config
from xquant.models import view_model

# As the models' own pages give them.
PARAMETERS = {
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "mistral-7b-v0.2": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "smollm2": 134_515_008,
}
FACTS = ("index", "hidden", "kv_heads", "query_heads", "head_size", "rotary_size", "dtype")


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_as_many_parameters_as_their_models(name: str) -> None:
    skeleton = Skeleton(shape_config(name), torch.bfloat16)
    assert skeleton.parameters == PARAMETERS.get(name, skeleton.parameters)
    if skeleton.quantization is None:
        routers = sum(p.numel() for n, p in skeleton.model.named_parameters() if "mlp.gate." in n)
        kept = skeleton.nbytes - 2 * skeleton.parameters
        # From 5.24 on transformers keeps the routers of some models in float32.
        assert kept in ((0, 2 * routers) if name.startswith("glm-4") else (0,))
    assert skeleton.positions == SHAPES[name]["max_position_embeddings"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_skeleton_has_the_layers_of_its_model(family: str) -> None:
    model = tiny(family)
    skeleton, view = Skeleton(model.config, model.dtype), view_model(model)
    assert skeleton.view.skipped == view.skipped
    assert all(p.is_meta for p in skeleton.model.parameters())
    for ours, theirs in zip(skeleton.view.layers, view.layers, strict=True):
        for fact in FACTS:
            assert getattr(ours, fact) == getattr(theirs, fact)


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "linear"])
def test_scaled_positions_are_no_obstacle(kind: str) -> None:
    rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0}
    config = LlamaConfig(**COMMON, rope_parameters=rope)
    assert len(Skeleton(config, torch.float32).view.layers) == 5


@pytest.mark.smollm2
def test_the_packaged_models_have_the_shapes_of_their_names() -> None:
    from xquant import load_model

    for name in ("smollm2", "smollm2-mha"):
        own, ours = load_model(name)[0].config, load_config(name)
        for fact in SHAPES[name]:
            assert getattr(own, fact) == getattr(ours, fact), fact


def test_what_cannot_be_planned_for_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"no shape 'llama-9': one of llama-7b"):
        shape_config("llama-9")
    with pytest.raises(ValueError, match=r"it has no config\.json"):
        load_config(str(tmp_path))
    with pytest.raises(ValueError, match="no model folder"):
        load_config(str(tmp_path / "none"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="cannot read"):
        load_config(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    with pytest.raises(ValueError, match="cannot read"):
        load_config(str(tmp_path))
    with pytest.raises(ValueError, match="no causal language model is made of a T5Config"):
        Skeleton(T5Config(), torch.float32)
    with pytest.raises(ValueError, match="MambaForCausalLM is not supported"):
        Skeleton(MambaConfig(num_hidden_layers=1), torch.float32)
