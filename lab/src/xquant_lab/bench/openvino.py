"""OpenVINO GenAI as a contender: the packaged model in its own format, with each precision of its cache."""

from typing import Any

import torch

from xquant.load import packaged_gguf

from .contenders import Peer, attentions, head_sizes
from .trials import Settings

PACKAGES = "openvino_genai", "openvino", "openvino_tokenizers"
BITS = {"f16": 16, "u8": 8, "u4": 4}
"""Of a number, by the precision of the cache."""
BLOCK = 32
"""Tokens of a block of its paged cache."""
RANGE_BYTES = 8
"""A scale and a zero point in fp32: of a token's values, and of a channel of a block of keys."""
READ = 512
"""Tokens that are read at a time while the cache is filled."""
NEAR = 128, 512
"""First and nearest tokens that these attend to, so that filling takes no time that grows with the square of
the context. Decoding attends to all."""


class OpenVino(Peer):
    """OpenVINO GenAI's paged cache, in its scheduler for many requests, of which there is one."""

    model, dtype = None, torch.bfloat16

    def __init__(self, network: Any, precision: str, settings: Settings) -> None:
        import openvino
        import openvino_genai as genai

        self._batch = 1
        self.name = f"openvino-{precision}"
        self.setting = f"paged attention, {genai.__version__.split('-')[0]}"
        self._tokens, self._network, self._bits = settings.context, network, BITS[precision]
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 1, READ
        scheduler.num_kv_blocks = (settings.context + settings.steps) // BLOCK + 2
        scheduler.use_sparse_attention = True
        filling = scheduler.sparse_attention_config = genai.SparseAttentionConfig()
        filling.mode = genai.SparseAttentionMode.TRISHAPE  # it is of prompts alone
        filling.num_retained_start_tokens_in_cache = NEAR[0]
        filling.num_retained_recent_tokens_in_cache = NEAR[1]
        options = {
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        }
        self._engine = genai.ContinuousBatchingPipeline(str(packaged_gguf()), scheduler, "CPU", options)
        answer = genai.GenerationConfig()
        answer.ignore_eos, answer.max_new_tokens = True, settings.steps + 2
        prompt = 1000 + torch.arange(settings.context, device="cpu").remainder(5000)[None]
        self._request = self._engine.add_request(0, openvino.Tensor(prompt.numpy()), answer)
        while not self._request.can_read():
            self._engine.step()

    @property
    def cache_bytes(self) -> int:
        _, heads, size = head_sizes(self._network)
        codes = 2 * size * self._bits // 8
        ranges = 0 if self._bits == 16 else RANGE_BYTES * (1 + size / BLOCK)
        return round(len(attentions(self._network)) * heads * self._tokens * (codes + ranges))

    def step(self) -> None:
        if not self._engine.has_non_finished_requests():
            raise RuntimeError(f"{self.name}: OpenVINO has ended the request")
        self._engine.step()
