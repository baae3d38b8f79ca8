"""GPUs that a plan can be made for."""

from dataclasses import dataclass

from ..catalogue import did_you_mean


@dataclass(frozen=True)
class GPU:
    """The figures of a GPU's data sheet.

    ``memory`` in bytes, ``bandwidth`` in bytes a second, ``flops`` a second: the peak of dense matrix
    products in fp16 or bf16, summed in fp32.
    """

    memory: float
    bandwidth: float
    flops: float

    @property
    def ridge(self) -> float:
        """FLOPs a byte from which on arithmetic is the bottleneck (arXiv 2508.10395, equation 2)."""
        return self.flops / self.bandwidth


# From NVIDIA's data sheet of each product; for GeForce, from the white papers of GA102 and Ada. FLOPs with
# sparsity are halved. 1 GB is 10^9 bytes: no driver reports less memory than that.
GPUS = {
    "a100-40gb": GPU(40e9, 1.555e12, 312e12),
    "a100-80gb": GPU(80e9, 2.039e12, 312e12),
    "a100-80gb-pcie": GPU(80e9, 1.935e12, 312e12),
    "h100-sxm": GPU(80e9, 3.35e12, 989e12),
    "h100-pcie": GPU(80e9, 2e12, 756e12),
    "h200": GPU(141e9, 4.8e12, 989e12),
    "l4": GPU(24e9, 0.3e12, 121e12),
    "l40s": GPU(48e9, 0.864e12, 362e12),
    "a6000": GPU(48e9, 0.768e12, 154.8e12),
    "rtx-4090": GPU(24e9, 1.008e12, 165.2e12),
    "rtx-3090": GPU(24e9, 0.936e12, 71e12),
}


def find_gpu(name: str) -> tuple[str, GPU]:
    """A GPU by its name, in whatever case and however hyphenated, with the name as it stands in `GPUS`.

    Raises:
        ValueError: not in the table.
    """
    for known, gpu in GPUS.items():
        if _letters(known) == _letters(name):
            return known, gpu
    near = did_you_mean(name.lower(), GPUS)
    raise ValueError(f"no GPU '{name}' in the table: one of {', '.join(GPUS)}{near}")


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))
