"""Speculative decoding in vLLM, in a process of its own: once numba has compiled n-grams, no other engine
starts there."""

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from support.vllm_engines import answers, engine, random_prompts, save_tiny


def test_drafts_change_no_answer(tmp_path: Path) -> None:
    """N-grams of the prompt are guessed, a few right: blocks are sealed anew with what was accepted."""
    tiny = save_tiny(tmp_path)
    prompts = [(prompt * 40)[:250] for prompt in random_prompts([7, 5, 9])]
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    own = {"xquant_kernel": "reference"}
    with engine(tiny, "kivi-4bit", **own) as llm:
        plain = answers(llm, prompts, 160)
    options = {"speculative_config": drafts, "disable_log_stats": False}
    with engine(tiny, "kivi-4bit", **own, **options) as llm:
        assert answers(llm, prompts, 160) == plain
        counters = {metric.name: metric for metric in llm.get_metrics()}
        assert counters["vllm:spec_decode_num_drafts"].value > 0
