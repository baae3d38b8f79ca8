"""The CUDA kernel on the CPU: compiled by g++ with the instructions of emulated.h."""

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from xquant.kernels.cuda import program, support

HERE = Path(__file__).parent
OPTIONS = ("-O1", "-std=c++17", "-shared", "-fPIC", "-w")
needs_a_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


class Emulated:
    """As `program.Program`."""

    def __init__(self, library: ctypes.CDLL, slots: int) -> None:
        self._library, self.slots = library, slots
        self.grids: list[tuple[int, int, int]] = []

    def launch(self, grid: tuple[int, int, int], arguments: ctypes.Structure) -> None:
        self.grids.append(grid)
        self._library.launch(ctypes.byref(arguments), *grid)


@cache
def library(constants: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    folder = tempfile.mkdtemp()
    file = f"{folder}/attend.so"
    flags = [f"-D{name}={value}" for name, value in constants]
    found = [f"-I{HERE}", f"-I{program.SOURCES}", str(HERE / "emulated.cpp")]
    subprocess.run(["g++", *OPTIONS, *flags, *found, "-o", file], check=True)
    loaded = ctypes.CDLL(file)
    shutil.rmtree(folder)
    return loaded


def split_for(monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    """Have the backend split a call as for a device that runs so many programs at once."""
    made = program.program

    def slotted(device: torch.device, constants: tuple[tuple[str, int], ...]) -> Any:
        found = made(device, constants)
        monkeypatch.setattr(found, "slots", slots)
        return found

    monkeypatch.setattr(program, "program", slotted)


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the backend run on the CPU."""
    made: dict[Any, Emulated] = {}

    def emulated(device: torch.device, constants: tuple[tuple[str, int], ...]) -> Emulated:
        if constants not in made:
            made[constants] = Emulated(library(constants), slots=12)
        return made[constants]

    monkeypatch.setattr(program, "program", emulated)
    monkeypatch.setattr(support, "missing", lambda device: "")
