"""ONNX Runtime as a contender: the packaged model as onnxruntime-genai's builder makes it for a CPU.

Its weights of 4 bits are rounded anew, in groups of 32, and its cache is in fp32. A cache in 8 or 4 bits
wants scales that a calibration makes.
"""

import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from xquant.load import load_model

from .contenders import Peer, attentions, head_sizes
from .trials import Settings

PACKAGES = "onnxruntime_genai", "onnx_ir"
"""The second is what its builder needs."""
BUILD = ("-p", "int4", "-e", "cpu", "--extra_options", "int4_block_size=32", "int4_accuracy_level=4")
"""Rows are rounded to 8 bits for products, as llama.cpp does."""
POSITIONS = 1 << 17
"""That its tables of angles have: they must have as many as a cache has tokens."""


class OnnxRuntime(Peer):
    """A session that reads and writes one cache in place, as onnxruntime-genai runs it."""

    model, dtype = None, torch.float32

    def __init__(self, network: Any, settings: Settings) -> None:
        import onnxruntime

        self._batch, self._runtime = 1, onnxruntime
        self.name, self.setting = "onnxruntime-f32", f"grouped queries, {onnxruntime.__version__}"
        self._session = _session(torch.get_num_threads())
        self._binding = bound = self._session.io_binding()
        self._tokens, layers = settings.context, len(attentions(network))
        _, heads, size = head_sizes(network)
        self._bytes = settings.context * 2 * layers * heads * size * 4
        shape = 1, heads, settings.context + settings.steps, size
        for layer in range(layers):
            for states in ("key", "value"):
                held = self._owned(torch.randn(shape, dtype=torch.float32, device="cpu"))
                bound.bind_ortvalue_input(f"past_key_values.{layer}.{states}", held)
                bound.bind_ortvalue_output(f"present.{layer}.{states}", held)
        bound.bind_ortvalue_input("input_ids", self._owned(torch.tensor([[1000]], device="cpu")))
        bound.bind_output("logits")

    @property
    def cache_bytes(self) -> int:
        return self._bytes

    def step(self) -> None:
        self._tokens += 1
        shown = torch.ones(1, self._tokens, dtype=torch.int64, device="cpu")
        self._binding.bind_ortvalue_input("attention_mask", self._owned(shown))
        self._session.run_with_iobinding(self._binding)

    def _owned(self, numbers: torch.Tensor) -> Any:
        """As the session takes them, in memory of its own."""
        return self._runtime.OrtValue.ortvalue_from_numpy(numbers.numpy())


@cache
def _session(threads: int) -> Any:
    """The packaged model, built once for all contexts."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.force_spinning_stop", "1")  # its turn is over
    with TemporaryDirectory() as folder:
        _build(Path(folder, "model"), Path(folder, "built"))
        file = str(Path(folder, "built", "model.onnx"))
        return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def _build(model: Path, to: Path) -> None:
    network, tokenizer = load_model("smollm2")
    network.config.max_position_embeddings = POSITIONS
    for each in (network, tokenizer):
        each.save_pretrained(model)
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", str(model), "-o", str(to)]
    made = subprocess.run([*builder, *BUILD, "hf_token=false"], capture_output=True, text=True, check=False)
    if made.returncode:
        last = (made.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"onnxruntime-genai's builder failed: {last}")
