"""vLLM in this process, for tests that have it installed: on the CPU, eager, with little memory."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Before anything imports vLLM.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from xquant import Calibration, KVCache, parse_method
from xquant.calibrators.run import calibrate_on

VOCABULARY = 256
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
    "eos_token_id": None,
}
LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "tie_word_embeddings": False,  # vLLM looks for both
}


_SHORT = 5, 17, 64, 96, 127, 128, 129, 160, 200, 255
LENGTHS = [*_SHORT, 256, 257, 300, 335, 383, 400, 512, 555, 640, 700]
"""Of prompts: shorter and longer than a block, and as long as some."""


def save_tiny(folder: Path, **other: Any) -> Path:
    """A random Llama, with heads that vLLM's own kernels take. ``other``: of its configuration."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**SHAPE, **other})).save_pretrained(folder)
    return folder


def save_mixed(folder: Path) -> Path:
    """A random Gemma 3: two layers of nine attend to all tokens, the others to windows of 100."""
    torch.manual_seed(0)
    sliding, full = "sliding_attention", "full_attention"
    kinds = [*[sliding] * 5, full, sliding, sliding, full]
    own = {"num_hidden_layers": len(kinds), "layer_types": kinds, "sliding_window": 100}
    own |= {"query_pre_attn_scalar": 32, "tie_word_embeddings": False}
    Gemma3ForCausalLM(Gemma3TextConfig(**{**SHAPE, **own})).save_pretrained(folder)
    return folder


def save_gpt_oss(folder: Path) -> Path:
    """A random gpt-oss: two layers of four attend to all tokens, the others to windows of 100, all with sinks
    that are learned."""
    torch.manual_seed(0)
    own = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 100}
    own |= {"tie_word_embeddings": False, "pad_token_id": None}
    model = GptOssForCausalLM(GptOssConfig(**{**SHAPE, **own}))
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, 2.0)  # so that much of a softmax is theirs
    model.save_pretrained(folder)
    return folder


def save_gemma4(folder: Path) -> Path:
    """A random Gemma 4: two layers of four attend to all tokens, with heads twice as wide as those of the
    others, which attend to windows of 100."""
    torch.manual_seed(0)
    own = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 100}
    own |= {"global_head_dim": 64, "num_kv_shared_layers": 0, "tie_word_embeddings": False}
    own |= {"hidden_size_per_layer_input": 0}
    Gemma4ForCausalLM(Gemma4TextConfig(**{**SHAPE, **own})).save_pretrained(folder)
    return folder


def save_falcon_h1(folder: Path) -> Path:
    """A random Falcon-H1: every layer has keys, values and a state of Mamba-2."""
    torch.manual_seed(0)
    own = {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16}
    FalconH1ForCausalLM(FalconH1Config(**{**SHAPE, **own})).save_pretrained(folder)
    return folder


def save_granite(folder: Path) -> Path:
    """A random Granite 4 hybrid: two layers keep keys and values, two a state of Mamba-2."""
    torch.manual_seed(0)
    own = {"layer_types": ["mamba", "attention"] * 2, "position_embedding_type": "rope"}
    own |= {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
    own |= {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 256}
    GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**{**SHAPE, **own})).save_pretrained(folder)
    return folder


def save_qwen3_next(folder: Path) -> Path:
    """A random Qwen3-Next: three layers of linear attention, and one that keeps keys and values."""
    torch.manual_seed(0)
    own = {"num_experts": 4, "num_experts_per_tok": 2}
    own |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    Qwen3NextForCausalLM(Qwen3NextConfig(**{**SHAPE, **LINEAR, **own})).save_pretrained(folder)
    return folder


def save_qwen3_5(folder: Path) -> Path:
    """The same of Qwen3.5."""
    torch.manual_seed(0)
    Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**SHAPE, **LINEAR})).save_pretrained(folder)
    return folder


def save_adapter(folder: Path, seed: int) -> Path:
    """A random LoRA adapter of queries and values of `save_tiny`'s model, of rank 8."""
    generator, rank = torch.Generator().manual_seed(seed), 8
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    sizes = {"q_proj": 4 * 32, "v_proj": 2 * 32}
    weights = {}
    for layer in range(SHAPE["num_hidden_layers"]):
        for name, size in sizes.items():
            start = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in {"A": (rank, SHAPE["hidden_size"]), "B": (size, rank)}.items():
                weights[f"{start}.lora_{part}.weight"] = torch.randn(shape, generator=generator) / 4
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def connector(folder: Path, **options: Any) -> dict[str, Any]:
    """The option of an engine that keeps blocks in a folder."""
    own = {"path": str(folder), **options}
    transfer = {"kv_connector": "XQuantConnector", "kv_role": "kv_both", "kv_connector_extra_config": own}
    return {"kv_transfer_config": transfer}


def kept(folder: Path, **options: Any) -> dict[str, Any]:
    """The options of an engine with a connector, whose metrics `hits` reads."""
    return {**connector(folder, **options), "disable_log_stats": False, "enable_prefix_caching": True}


def hits(llm: Any, name: str = "external_prefix_cache_hits") -> float:
    """What vLLM has counted under a name."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}")


def configured(folder: Path, **options: Any) -> Any:
    """The configuration of an engine that is not started."""
    from vllm.engine.arg_utils import EngineArgs

    import xquant_vllm

    xquant_vllm.register()
    settings: dict[str, Any] = {"dtype": "bfloat16", "skip_tokenizer_init": True, "max_model_len": 1024}
    return EngineArgs(model=str(folder), **{**settings, **options}).create_engine_config()


@contextmanager
def engine(folder: Path, spec: str | None = None, **options: Any) -> Iterator[Any]:
    """An engine of vLLM; without a ``spec`` as it is without xquant. Options that begin with ``xquant_`` are
    xquant's."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    settings: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 32 << 20,
    }
    own = {name: options.pop(name) for name in list(options) if name.startswith("xquant_")}
    settings["additional_config"] = {} if spec is None else {"xquant": spec, **own}
    try:
        llm = LLM(str(folder), **{**settings, **options})
        yield llm
        llm.llm_engine.engine_core.shutdown()
    finally:
        cleanup_dist_env_and_memory()


def answers(llm: Any, prompts: list[list[int]], new: int, adapters: Any = None) -> list[list[int]]:
    """The tokens that it goes on with, the likeliest ones. ``adapters``: a LoRA request of each prompt."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    out = llm.generate(given, greedy, use_tqdm=False, lora_request=adapters)
    return [list(one.outputs[0].token_ids) for one in out]


def logprobs(llm: Any, prompts: list[list[int]], new: int) -> list[list[dict[int, float]]]:
    """Of the likeliest four at every token that it goes on with."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=4)
    out = llm.generate([{"prompt_token_ids": p} for p in prompts], greedy, use_tqdm=False)
    return [
        [{word: found.logprob for word, found in each.items()} for each in one.outputs[0].logprobs]
        for one in out
    ]


def read_from_store(folder: Path, spec: str) -> list[list[list[dict[int, float]]]]:
    """What prompts give with ``attend=store``: read at once, as hits, in chunks, and as hits again."""
    prompts, found = random_prompts([17, 128, 300, 385, 555], seed=4), []
    for options in ({}, {"max_num_batched_tokens": 201, "max_num_seqs": 4}):
        with engine(folder, spec, xquant_attend="store", **options) as llm:
            found.append(logprobs(llm, prompts, 12))
            found.append([logprobs(llm, [prompt], 12)[0] for prompt in prompts])
    return found


def cache_config(llm: Any) -> Any:
    return llm.llm_engine.vllm_config.cache_config


def random_prompts(lengths: list[int], seed: int = 0, vocabulary: int = VOCABULARY) -> list[list[int]]:
    """Prompts of these lengths, of words below ``vocabulary``."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in lengths]


def library(
    folder: Path,
    spec: str,
    prompts: list[list[int]],
    new: int,
    kernel: str = "reference",
    made: Calibration | None = None,
    cuts: tuple[int, ...] = (),
) -> list[list[int]]:
    """What `KVCache` answers, prompts cut here, each part in one forward pass."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        cache = KVCache(model, spec, calibration=made, kernel=kernel)
        for start, stop in zip((0, *cuts), cuts, strict=False):
            model(input_ids=ids[:, start:stop], past_key_values=cache)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=model.config.vocab_size,  # never generated
            pad_token_id=0,
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


def calibrated(model: Path, spec: str, samples: torch.Tensor, folder: Path) -> tuple[Calibration, str]:
    """A calibration on these samples, and the file that it is in."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found = calibrate_on(loaded, samples, parse_method(spec))
    file = folder / "calibration.safetensors"
    found.save(file)
    return found, str(file)


class Library:
    """`KVCache`, beside an engine that is asked the same."""

    def __init__(
        self, folder: Path, spec: str, kernel: str = "reference", made: Calibration | None = None
    ) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._options = {"method": spec, "kernel": kernel, "calibration": made}

    def gives(self, prompt: list[int], answer: list[int], cuts: tuple[int, ...] = ()) -> bool:
        """Whether every token of an answer is the likeliest one here too."""
        return self._logits(prompt, answer, cuts).argmax(-1).tolist() == answer

    def almost_gives(self, prompt: list[int], answer: list[int], cuts: tuple[int, ...] = ()) -> bool:
        """Whether a token that is not the likeliest one is so by no more than roundings move logits.

        Sums in another order round otherwise. Where that takes a code over a border, all later layers have
        other states. What it may come to is found out by embeddings that differ in their last digits.
        """
        expected, weight = (
            self._logits(prompt, answer, cuts),
            self._model.get_input_embeddings().weight,
        )
        behind = expected.amax(-1) - expected[range(len(answer)), answer]
        original, moved = weight.data, torch.zeros(len(answer))
        for seed in range(8):
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
            weight.data = original * (1 + 1e-6 * noise)
            other = self._logits(prompt, answer, cuts)
            moved = torch.maximum(moved, (other - expected).abs().amax(-1))
        weight.data = original
        return bool((behind <= moved).all())

    @torch.no_grad()
    def _logits(self, prompt: list[int], answer: list[int], cuts: tuple[int, ...] = ()) -> torch.Tensor:
        """Of each token of an answer, after the prompt and the tokens before; a prompt is read in parts."""
        cache = KVCache(self._model, **self._options)
        *parts, last = torch.tensor([prompt]).tensor_split(cuts, 1)
        for part in parts:
            self._model(input_ids=part, past_key_values=cache)
        found = []
        for tokens in (last, *(torch.tensor([[token]]) for token in answer[:-1])):
            out = self._model(input_ids=tokens, past_key_values=cache, logits_to_keep=1)
            found.append(out.logits[0, -1])
        return torch.stack(found)
