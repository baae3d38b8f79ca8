"""Programs for one kind of GPU: CUDA C++ compiled by NVRTC, which torch brings, and launched by the driver."""

import ctypes
import hashlib
import threading
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ...files import cache_folder, write_atomically

SOURCES = Path(__file__).parent / "csrc"
KERNEL = "attend"
THREADS = 256
SHARED_BYTES = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"""
MULTIPROCESSORS = 16
"""CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT"""

_lock = threading.Lock()
_known: dict[Any, "Program"] = {}


def program(device: torch.device, constants: tuple[tuple[str, int], ...]) -> "Program":
    """The kernel for a device, compiled for these constants; once a process, and from disk where it was compiled
    before.

    Raises:
        RuntimeError: it does not compile, or the driver refuses it.
        OSError: there is no NVRTC, or no driver.
    """
    index = device.index if device.index is not None else torch.cuda.current_device()
    with _lock:
        if (index, constants) not in _known:
            _known[index, constants] = Program(index, constants)
        return _known[index, constants]


class Program:
    """A kernel on one device."""

    def __init__(self, index: int, constants: tuple[tuple[str, int], ...]) -> None:
        major, minor = torch.cuda.get_device_capability(index)
        image = compiled(f"sm_{major}{minor}", constants)
        self._device = index
        self._module, self._function = c_void_p(), c_void_p()
        with torch.cuda.device(index):
            torch.cuda.current_stream().synchronize()  # there is a context from here on
            ask(driver().cuModuleLoadData(byref(self._module), image))
            name = KERNEL.encode()
            ask(driver().cuModuleGetFunction(byref(self._function), self._module, name))
            found, size = c_void_p(), c_size_t()
            symbol = c_char_p(b"working_bytes")
            ask(driver().cuModuleGetGlobal_v2(byref(found), byref(size), self._module, symbol))
            needed = c_int()
            ask(driver().cuMemcpyDtoH_v2(byref(needed), found, c_size_t(4)))
            self._shared = needed.value
            ask(driver().cuFuncSetAttribute(self._function, SHARED_BYTES, self._shared))
            fitting = c_int()
            ask(
                driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    byref(fitting), self._function, THREADS, c_size_t(self._shared)
                )
            )
        properties = torch.cuda.get_device_properties(index)
        self.slots = max(fitting.value, 1) * properties.multi_processor_count
        """Programs that run at a time."""

    def launch(self, grid: tuple[int, int, int], arguments: ctypes.Structure) -> None:
        """On torch's current stream of the device."""
        pointers = (c_void_p * 1)(ctypes.addressof(arguments))
        stream = c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        with torch.cuda.device(self._device):
            ask(
                driver().cuLaunchKernel(
                    self._function, *grid, THREADS, 1, 1, self._shared, stream, pointers, None
                )
            )


def compiled(target: str, constants: tuple[tuple[str, int], ...]) -> bytes:
    """The kernel as a GPU runs it."""
    source = joined(SOURCES / "attend.cu")
    options = [f"--gpu-architecture={target}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in constants]
    key = hashlib.sha256("\0".join([source, *options, version()]).encode()).hexdigest()
    file = cache_folder() / "cuda" / f"{key}.cubin"
    if not file.exists():
        image = _compile(source, options)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, image)
        except OSError:  # it is compiled again the next time
            return image
        return image
    return file.read_bytes()


def joined(file: Path, seen: set[Path] | None = None) -> str:
    """A source with what it includes in place, each file once: NVRTC needs no folder then."""
    seen = set() if seen is None else seen
    if file in seen:
        return ""
    seen.add(file)
    lines = []
    for line in file.read_text().splitlines():
        if line.startswith("#include"):
            name = line.split('"')[1]
            line = joined(file.parent / name, seen) if (file.parent / name).exists() else ""
        lines.append("" if line.startswith("#pragma once") else line)
    return "\n".join(lines) + "\n"


def _compile(source: str, options: list[str]) -> bytes:
    library, handle = nvrtc(), c_void_p()

    def ask_it(code: int) -> None:
        if code:
            library.nvrtcGetErrorString.restype = c_char_p
            raise RuntimeError(f"NVRTC: {library.nvrtcGetErrorString(code).decode()}{log()}")

    def log() -> str:
        size = c_size_t()
        library.nvrtcGetProgramLogSize(handle, byref(size))
        text = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(handle, text)
        return f": {text.value.decode(errors='replace')}" if text.value else ""

    ask_it(library.nvrtcCreateProgram(byref(handle), source.encode(), b"attend.cu", 0, None, None))
    try:
        given = (c_char_p * len(options))(*(option.encode() for option in options))
        ask_it(library.nvrtcCompileProgram(handle, len(options), given))
        size = c_size_t()
        ask_it(library.nvrtcGetCUBINSize(handle, byref(size)))
        image = ctypes.create_string_buffer(size.value)
        ask_it(library.nvrtcGetCUBIN(handle, image))
        return image.raw
    finally:
        library.nvrtcDestroyProgram(byref(handle))


@cache
def nvrtc() -> ctypes.CDLL:
    """NVRTC of torch's version of CUDA.

    Raises:
        OSError: there is none.
    """
    major = (torch.version.cuda or "").split(".")[0]
    try:
        return ctypes.CDLL(f"libnvrtc.so.{major}")
    except OSError:
        return ctypes.CDLL("libnvrtc.so")


@cache
def version() -> str:
    """Of NVRTC."""
    major, minor = c_int(), c_int()
    nvrtc().nvrtcVersion(byref(major), byref(minor))
    return f"{major.value}.{minor.value}"


@cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def ask(code: int) -> None:
    """Raise what the driver says where it does not succeed."""
    if code:
        said = c_char_p()
        driver().cuGetErrorString(code, byref(said))
        raise RuntimeError(f"CUDA: {said.value.decode() if said.value else code}")
