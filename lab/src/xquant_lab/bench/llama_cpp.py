"""llama.cpp as a contender: the packaged model in its own format, with each type of its cache."""

import ctypes
import weakref
from functools import cache
from typing import Any

import torch

from xquant import compat
from xquant.load import packaged_gguf

from .capacity import full_bytes
from .contenders import Peer
from .trials import Settings

BLOCK_BYTES = {"f16": 64, "q8_0": 34, "q4_0": 18}
"""Bytes of 32 numbers, by the type of the cache: those of q8_0 and q4_0 share a scale."""
SETTINGS = ("f16", True), ("f16", False), ("q8_0", True), ("q4_0", True)
"""Types, and whether with flash attention: there are no quantized values without it."""
READ = 512
"""Tokens that the model reads. The rest of the cache are copies of them at later positions, so that filling
takes no time that grows with the square of the context."""
PAST, ASIDE = 0, 1
"""Sequences: what is decoded, and where copies are made."""


class LlamaCpp(Peer):
    """A context of llama.cpp whose keys and values are both of one type."""

    model, dtype = None, torch.float16

    def __init__(self, network: Any, form: str, flash: bool, settings: Settings) -> None:
        import llama_cpp

        self._lib = lib = llama_cpp
        self._batch = 1
        self.name = f"llama.cpp-{form}"
        self.setting = f"{'with' if flash else 'without'} flash attention, {lib.__version__}"
        full = full_bytes(compat.text_config(network), self.dtype, settings.context, 1)
        self._bytes = full * BLOCK_BYTES[form] // BLOCK_BYTES["f16"]
        asked = lib.llama_context_default_params()
        asked.n_ctx = settings.context + READ + settings.steps
        asked.n_batch = asked.n_ubatch = READ
        asked.n_threads = asked.n_threads_batch = torch.get_num_threads()
        asked.type_k = asked.type_v = getattr(lib, f"GGML_TYPE_{form.upper()}")
        asked.flash_attn_type = (
            lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        asked.n_seq_max, asked.kv_unified = 2, True  # so that sequences can share cells
        self._context = lib.llama_init_from_model(_weights(), asked)
        if not self._context:
            raise RuntimeError(f"{self.name}: llama.cpp makes no such context")
        weakref.finalize(self, lib.llama_free, self._context)
        self._fill(settings.context)

    @property
    def cache_bytes(self) -> int:
        return self._bytes

    def step(self) -> None:
        self._decode([1000])

    def _decode(self, ids: list[int]) -> None:
        """Read tokens after those that are held."""
        tokens = (self._lib.llama_token * len(ids))(*ids)
        if self._lib.llama_decode(self._context, self._lib.llama_batch_get_one(tokens, len(ids))):
            raise RuntimeError(f"{self.name}: llama.cpp cannot decode")
        self._lib.llama_synchronize(self._context)

    def _fill(self, tokens: int) -> None:
        lib, context = self._lib, self._context
        read = min(READ, tokens)
        self._decode([1000 + i for i in range(read)])
        size = lib.llama_state_seq_get_size(context, PAST)
        state = (ctypes.c_uint8 * size)()
        lib.llama_state_seq_get_data(context, state, size, PAST)
        memory = lib.llama_get_memory(context)
        for start in range(read, tokens, read):
            if not lib.llama_state_seq_set_data(context, state, size, ASIDE):
                raise RuntimeError(f"{self.name}: llama.cpp takes no copy of its own state")
            lib.llama_memory_seq_rm(memory, ASIDE, tokens - start, -1)
            lib.llama_memory_seq_add(memory, ASIDE, -1, -1, start)
            lib.llama_memory_seq_cp(memory, ASIDE, PAST, -1, -1)
            lib.llama_memory_seq_rm(memory, ASIDE, -1, -1)


@cache
def _weights() -> Any:
    """The packaged model, loaded once for all contexts."""
    import llama_cpp as lib
    from llama_cpp._logger import set_verbose

    set_verbose(False)
    lib.llama_backend_init()
    asked = lib.llama_model_default_params()
    return lib.llama_model_load_from_file(str(packaged_gguf()).encode(), asked)
