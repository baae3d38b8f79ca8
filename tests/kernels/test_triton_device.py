"""Triton's kernels run on the device of their tensors, which need not be the current one."""

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton", minversion="3.5")

from support import triton_interpreter
from support.attention_cases import DEVICE, Case, error, filled
from support.caches import make_cache
from support.models import prompt, tiny
from xquant import KVCache, StaticKVCache
from xquant.kernels.splits import Limits
from xquant.kernels.triton import device
from xquant.kernels.triton.jit.attend import attend

pytestmark = pytest.mark.cases(1)

triton_interpreter.mend()

SOURCES = Path(device.__file__).parent
FIRST, SECOND, CPU = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")


class Started:
    """What is started while it is in place, and on which device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.right: dict[str, bool] = {}
        """By kernel, whether the current device was that of its tensors each time."""
        self.current: torch.device | None = None
        run = type(attend).run

        def recorded(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            devices = {part.device for part in tree_leaves(args) if isinstance(part, Tensor)}
            name = kernel.fn.__name__
            self.right[name] = self.right.get(name, True) and devices == {self.current}
            return run(kernel, *args, **kwargs)

        monkeypatch.setattr(type(attend), "run", recorded)
        monkeypatch.setattr(device, "made_current", self._made_current)

    @contextmanager
    def _made_current(self, where: torch.device) -> Iterator[None]:
        self.current = where
        yield
        self.current = None


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    return Started(monkeypatch)


def attend_to(spec: str) -> None:
    case = Case(spec, path="triton", layers=2, tokens=75)
    assert error(case, filled(case)) < 1e-2


def model() -> Any:
    return tiny("llama", head_dim=32, hidden_size=128, num_hidden_layers=1).to(DEVICE)


@torch.no_grad()
def attend_to_pages() -> None:
    one = model()
    cache = StaticKVCache(one, "kivi-4bit:group=32", 64, kernel="triton")
    for length in (40, 1):
        one(prompt(1, length).to(DEVICE), past_key_values=cache)


@torch.no_grad()
def read_ranked_codes() -> None:
    one = model()
    cache = make_cache(one, "tc-2bit:group=32")
    for length in (40, 40):
        one(prompt(1, length).to(DEVICE), past_key_values=cache)


@pytest.mark.parametrize(
    ("act", "kernels"),
    [
        (lambda: attend_to("kivi-4bit:group=32"), {"attend", "combine", "seal"}),
        (lambda: attend_to("kvquant-3bit-1%:group=32"), {"attend", "combine", "assign"}),
        (
            lambda: attend_to("xquant-cl-4bit:group=32,form=gqa,first_layers=1"),
            {"attend_exact", "rebuild", "sum_states", "combine", "accumulate", "seal"},
        ),
        (attend_to_pages, {"attend", "combine", "append", "seal"}),
        (read_ranked_codes, {"rank", "decode"}),
    ],
)
def test_every_kernel_is_started_where_its_tensors_are(
    act: Callable[[], None],
    kernels: set[str],
    started: Started,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    triton_interpreter.take_for_a_gpu(monkeypatch)
    act()
    assert started.right == dict.fromkeys(kernels, True)


def test_so_is_what_is_tried(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    triton_interpreter.take_for_a_gpu(monkeypatch)
    cache = KVCache(model(), "kivi-4bit:group=32")
    assert cache.report().kernel == "triton (agrees with the reference)"
    assert started.right == {"attend": True, "combine": True}


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Two GPUs, of which the second is the current one: those that are made the current one."""
    found: list[torch.device] = []

    @contextmanager
    def recorded(where: torch.device) -> Iterator[None]:
        found.append(where)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", recorded)
    return found


class Kernel:
    """In place of a kernel of Triton's."""

    def __init__(self, entered: list[torch.device]) -> None:
        self.entered = entered
        self.compiled: list[list[torch.device]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*args: Any, **constants: Any) -> None:
            self.seen = grid, args, constants, list(self.entered)

        return run

    def warmup(self, *args: Any, grid: tuple[int, ...], **constants: Any) -> Any:
        self.compiled.append(list(self.entered))
        metadata = SimpleNamespace(num_warps=constants["num_warps"], shared=1000)
        return SimpleNamespace(run=None, n_regs=128, metadata=metadata)


@pytest.mark.parametrize(("where", "made"), [(FIRST, [FIRST]), (SECOND, []), (CPU, [])])
def test_a_gpu_is_made_the_current_one_where_it_is_not(
    where: torch.device, made: list[torch.device], entered: list[torch.device]
) -> None:
    kernel = Kernel(entered)
    device.start(kernel, (3, 2), where, 5, D=7)
    assert kernel.seen == ((3, 2), (5,), {"D": 7}, made)


def test_a_kernel_is_compiled_once_to_know_how_many_run_at_once(
    entered: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "limits_of", lambda where: Limits(10, 32, 2048, 1 << 16, 200_000))
    kernel = Kernel(entered)
    slots = device.Slots(kernel, FIRST)
    assert [slots.of(5, num_warps=warps) for warps in (4, 4, 8, 8)] == [40, 40, 20, 20]
    assert kernel.compiled == [[FIRST], [FIRST, FIRST]]


def test_nothing_is_compiled_for_a_cpu(entered: list[torch.device]) -> None:
    kernel = Kernel(entered)
    assert device.Slots(kernel, CPU).of(5, num_warps=4) == device.UNKNOWN
    assert not kernel.compiled


def test_no_kernel_is_started_but_there() -> None:
    """`kernel[grid](...)` stands in one place, and nothing asks Triton in another way."""
    found = []
    for file in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            asked = isinstance(node.func, ast.Attribute) and node.func.attr in ("run", "warmup")
            if isinstance(node.func, ast.Subscript) or asked:
                found.append(str(file.relative_to(SOURCES)))
    assert found == ["device.py"] * 2
