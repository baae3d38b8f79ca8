"""Which models are served, and what is said of the others: a few of the classes that
``tests/upstream/every_class.py`` goes through by hand."""

import re
from collections.abc import Iterable
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from support.models import tiny
from upstream.every_class import RIGHT, outcomes
from xquant import KVCache
from xquant.models import view_model

SERVED = [
    "GlmAsrForConditionalGeneration",  # the audio tower comes first and has self_attn too
    "DeepseekOcr2ForConditionalGeneration",  # so has the vision tower
    "CsmForConditionalGeneration",  # two decoders; the text configuration is the first one's
    "LagunaForCausalLM",
    "HiggsAudioV2ForConditionalGeneration",
    "BeamForCausalLM",  # nothing is turned
    "BloomForCausalLM",
    "MllamaForCausalLM",  # cross-attention between
    "ModernBertDecoderForCausalLM",  # what it calls a decoder is another part
]
IN_PART = {
    "DeepseekV3ForCausalLM": r"its cache keeps latents \(MLA\), which are .*",
    "MiMoV2FlashForCausalLM": r"its values are not what a projection gives",
    "Gemma3nForCausalLM": r"its values are not what a projection gives",
}
"""Served by methods that keep keys and values, and why not by those that keep layer inputs."""
REFUSED = {
    "MiniMaxForCausalLM": r"it takes caches of its own kind alone",
    "LongcatFlashForCausalLM": r"no decoder layers that attend were found",
    "RecurrentGemmaForCausalLM": r"no full-attention layer to compress \(sliding window of 2048",
    "MambaForCausalLM": r"no decoder layers that attend were found",
    "HrmTextForCausalLM": r"several decoders \(L_module, H_module\)",
    "T5GemmaForConditionalGeneration": r"an encoder-decoder model",
}


def known(names: Iterable[str]) -> list[str]:
    """Those that this version of transformers has."""
    there = set(dir(transformers))
    return [name for name in names if name in there]


@pytest.mark.parametrize("name", known(SERVED))
def test_the_text_decoder_is_found_and_served(name: str) -> None:
    assert set(outcomes(name).values()) == {RIGHT}


@pytest.mark.parametrize("name", known(IN_PART))
def test_keys_and_values_are_enough(name: str) -> None:
    *states, of_inputs = outcomes(name).values()
    assert set(states) == {RIGHT}
    assert re.fullmatch(rf"refused: {name}: {IN_PART[name]}: use a method .*", of_inputs)


@pytest.mark.parametrize("name", known(REFUSED))
def test_what_cannot_be_served_is_refused_by_name(name: str) -> None:
    (outcome,) = set(outcomes(name).values())
    assert re.fullmatch(rf"refused: {name} is not supported: .*{REFUSED[name]}.*", outcome)


def test_key_value_heads_are_those_of_the_layer() -> None:
    """The configuration says one thing of all layers; a layer may have heads of its own."""
    model = tiny("llama")
    model.config.num_key_value_heads = model.config.num_attention_heads
    assert {(v.kv_heads, v.query_heads) for v in view_model(model).layers} == {(2, 4)}


@pytest.mark.parametrize(
    "thing",
    [
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a"))),
        PreTrainedConfig(),
        LlamaForCausalLM,
        "llama",
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_what_is_not_a_model_is_refused(thing: Any) -> None:
    with pytest.raises(TypeError, match=r"a transformers model is needed, not "):
        KVCache(thing, "full")
