"""The bytes of weights, caches and states of models that people run, against sums of their shapes by hand."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.models import tiny
from xquant.catalogue import Recommended

CONFIGS = Path(__file__).parent / "configs"
TOKENS = 8192
WITHIN = 0.02


@dataclass
class Sum:
    """What a model's shapes add up to: weights that a quantization packs, each in ``bits`` with its share of
    scales and zero points, those in 16 bits; layers that cache every token or a window, with the numbers of
    a token, and the bytes of states."""

    packed: int
    bits: float
    plain: int
    full: tuple[int, int]
    windows: tuple[int, int, int] = (0, 0, 0)
    states: int = 0


def mlp(hidden: int, inner: int) -> int:
    return 3 * hidden * inner


def attention(hidden: int, queries: int, heads: int, size: int = 128) -> int:
    return hidden * size * (2 * queries + 2 * heads)


def hybrid(layers: int, experts: int) -> int:
    """The layers of Qwen3-Next and its like: three of four are linear attention, and all have experts."""
    gated = 2048 * 256 * (3 * 16 + 2 * 2)  # queries come with a gate
    linear = 2048 * (2 * 16 * 128 + 2 * 32 * 128 + 2 * 32) + 32 * 128 * 2048 + 8192 * 4
    routed = (experts + 1) * mlp(2048, 512) + experts * 2048
    return layers // 4 * (gated + 3 * linear) + layers * routed


LINEAR_STATE = 32 * 128 * 128 * 4 + 8192 * 4 * 2  # in fp32, and what the convolution looks back at
LATENT_ATTENTION = (
    7168 * 1536 + 1536 * 128 * (128 + 64) + 7168 * (512 + 64) + 512 * 128 * (128 + 128) + 128 * 128 * 7168
)
SIGHT = 27 * (4 * 1152**2 + 2 * 1152 * 4304) + 3 * 14 * 14 * 1152 + 4096 * 1152 + 1152 * 3840
# Bits of a weight, and of the scale and the zero point that its group shares.
SUMS = {
    "qwen3-32b-awq": Sum(
        64 * (attention(5120, 64, 8) + mlp(5120, 25600)), 4 + 20 / 128, 2 * 151936 * 5120, (64, 2 * 8 * 128)
    ),
    "qwen3-30b-a3b-gptq-int4": Sum(
        48 * (attention(2048, 32, 4) + 128 * mlp(2048, 768)),
        4 + 20 / 128,
        2 * 151936 * 2048 + 48 * 128 * 2048,
        (48, 2 * 4 * 128),
    ),
    "llama-3.1-8b-bnb-4bit": Sum(
        32 * (attention(4096, 32, 8) + mlp(4096, 14336)),
        4 + 8.125 / 64,
        2 * 128256 * 4096,
        (32, 2 * 8 * 128),
    ),
    "deepseek-v3": Sum(
        61 * LATENT_ATTENTION + 3 * mlp(7168, 18432) + 58 * 257 * mlp(7168, 2048),
        8 + 32 / 128**2,
        2 * 129280 * 7168 + 58 * 256 * 7168,
        (61, 512 + 64),
    ),
    "gpt-oss-20b": Sum(
        24 * 32 * mlp(2880, 2880),
        4 + 8 / 32,
        24 * attention(2880, 64, 8, 64) + 2 * 201088 * 2880,
        (12, 2 * 8 * 64),
        (12, 2 * 8 * 64, 128),
    ),
    "llama-3.3-70b-w4a16": Sum(
        80 * (attention(8192, 64, 8) + mlp(8192, 28672)), 4 + 16 / 128, 2 * 128256 * 8192, (80, 2 * 8 * 128)
    ),
    "qwen3-8b-int4-torchao": Sum(
        36 * (attention(4096, 32, 8) + mlp(4096, 12288)), 4 + 32 / 128, 2 * 151936 * 4096, (36, 2 * 8 * 128)
    ),
    "mistral-small-24b-fp8-dynamic": Sum(
        40 * (attention(5120, 32, 8) + mlp(5120, 32768)), 8, 2 * 131072 * 5120, (40, 2 * 8 * 128)
    ),
    "glm-4.5-air": Sum(
        0,
        16,
        46 * attention(4096, 96, 8) + mlp(4096, 10944) + 45 * 129 * mlp(4096, 1408) + 2 * 151552 * 4096,
        (46, 2 * 8 * 128),
    ),
    "gemma-3-12b": Sum(
        0,
        16,
        48 * (attention(3840, 16, 8, 256) + mlp(3840, 15360)) + 262208 * 3840 + SIGHT,
        (8, 2 * 8 * 256),
        (40, 2 * 8 * 256, 1024),
    ),
    "qwen3.5-35b-a3b": Sum(
        0, 16, hybrid(40, 256) + 2 * 248320 * 2048, (10, 2 * 2 * 256), states=30 * LINEAR_STATE
    ),
    "qwen3-next-80b-a3b": Sum(
        0, 16, hybrid(48, 512) + 2 * 151936 * 2048, (12, 2 * 2 * 256), states=36 * LINEAR_STATE
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_plan_is_within_2_percent_of_the_sum_of_shapes(run, tmp_path, name: str) -> None:
    shutil.copy(CONFIGS / f"{name}.json", tmp_path / "config.json")
    asked = ("--gpu", "h200", "--method", "full", "--context", TOKENS, "--json", "-")
    status, out, err = run("plan", tmp_path, *asked)
    assert (status, err) == (0, "")
    (row,), by_hand = json.loads(out), SUMS[name]
    weights = by_hand.packed * by_hand.bits / 8 + 2 * by_hand.plain
    layers, numbers = by_hand.full
    few, of_token, window = by_hand.windows
    assert row["weights_bytes"] == pytest.approx(weights, rel=WITHIN)
    held = row["parts"]["codes"] + row["parts"]["tail"]
    assert held == pytest.approx(2 * layers * numbers * TOKENS, rel=WITHIN)
    beside = 2 * few * of_token * window + by_hand.states
    assert row["parts"]["skipped"] == pytest.approx(beside, rel=WITHIN)
    assert row["cache_bytes"] == pytest.approx(held + beside, rel=WITHIN)


def test_the_weights_are_described(run, tmp_path) -> None:
    shutil.copy(CONFIGS / "qwen3-32b-awq.json", tmp_path / "config.json")
    asked = ("plan", tmp_path, "--gpu", "rtx-4090", "--method", "kivi-4bit")
    status, out, _ = run(*asked)
    assert status == 0 and "19.33 GB in AWQ 4 bits in groups of 128, the rest float16" in out
    assert "Take full" in out
    full, _ = json.loads(run(*asked, "--json", "-")[1])
    assert full["weights"] == "AWQ 4 bits in groups of 128, the rest float16"
    (other, _) = json.loads(run(*asked, "--weights-bits", 8, "--json", "-")[1])
    assert other["weights"] == "8 bits in groups of 128, the rest float16"
    assert other["weights_bytes"] > 1.7 * full["weights_bytes"]


def test_it_says_what_would_fit(run) -> None:
    asked = ("plan", "--shape", "gemma-3-27b", "--method", "full", "--gpu")
    status, out, _ = run(*asked, "rtx-4090", "--context", 16384)
    assert status == 0 and "None fits: not one token" in out
    assert "What would fit: weights of 4 bits with full (18.44 GB in all)." in out
    _, out, _ = run(*asked, "h100-sxm", "--context", 131072, "--batch", 2)
    assert "None fits at 131,072 tokens, batch 2: the longest context there is" in out
    ways = next(line for line in out.splitlines() if line.startswith("What would fit: kivi-4bit ("))
    assert "or weights of 8 bits with full (" in ways and "or weights of 4 bits with full (" in ways
    _, out, _ = run(*asked, "l4", "--context", 131072, "--batch", 8)
    assert "Nor would a smaller method, or weights of 4 bits." in out


def test_methods_that_a_model_refuses_are_left_out_unless_they_are_asked_for(
    run, tmp_path, monkeypatch
) -> None:
    usual = (Recommended("kivi-4bit", "speed"), Recommended("xquant-4bit", "a paper's method"))
    monkeypatch.setattr("xquant.cli.plan.RECOMMENDED", usual)
    config = tiny("deepseek_v3").config
    config.save_pretrained(tmp_path)
    asked = ("plan", tmp_path, "--gpu", "h100-sxm", "--context", 300)
    status, out, _ = run(*asked)
    assert status == 0 and "\nnot xquant-4bit: DeepseekV3" in out
    status, out, err = run(*asked, "--method", "xquant-4bit")
    assert (status, out) == (2, "") and "its cache keeps latents" in err
