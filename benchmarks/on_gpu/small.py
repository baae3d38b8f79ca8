"""One small call of attention by each kernel, for tools that slow it down: `python -m on_gpu.small`."""

import torch

from support.attention_cases import DEVICE, Case, error, filled
from xquant.kernels.trial import tolerance


def main() -> None:
    """Fail where it is not right."""
    if DEVICE.type == "cpu":
        from support import triton_interpreter

        triton_interpreter.mend()
    for kernel in ("triton",) if DEVICE.type == "cpu" else ("cuda", "triton"):
        case = Case("kivi-4bit", head_size=128, tokens=300, layers=1, path=kernel, dtype=torch.bfloat16)
        with torch.inference_mode():
            found = error(case, filled(case))
        print(f"{kernel}: error {found:.2g}")
        if not found <= tolerance(case.dtype):
            raise SystemExit(f"{kernel}: attention is not right")


if __name__ == "__main__":
    main()
