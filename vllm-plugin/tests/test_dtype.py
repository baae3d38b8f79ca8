"""Methods as values of ``--kv-cache-dtype``: by a stand-in for vLLM 0.33's registry, and by its own sources.

The sources are those of its wheel, unpacked into the folder that ``XQUANT_VLLM_033`` names, in an environment
that has what vLLM 0.32 needs. Nothing of them is compiled.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from support.vllm_dtypes import KVQuantMode, Registry, stand_in
from xquant import parse_method
from xquant.catalogue import load
from xquant_vllm import dtype, guard

SOURCES = os.environ.get("XQUANT_VLLM_033", "")
NAME = "xquant_kivi_4bit"
ODD = ["kivi-2bit:tail=128,group=32", "tc-1.5bit", "kvarn-k4v2:sink=4", "int4-gs64", "asymkv-1.5bit"]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    found = Registry()
    stand_in(monkeypatch, found)
    return found


def arguments(name: str = NAME, **additional: str) -> Any:
    """What `dtype` looks at of an engine's arguments."""
    own = {"kv_cache_dtype": name, "kv_cache_dtype_skip_layers": []}
    return SimpleNamespace(**own, additional_config=additional)


def configuration(name: str = NAME, **additional: str) -> Any:
    """And of its configuration, as other processes are given it."""
    held = SimpleNamespace(cache_dtype=name)
    return SimpleNamespace(cache_config=held, additional_config=additional)


@pytest.mark.parametrize("spec", [*ODD, *(each.example for each in load().values())])
def test_every_spec_has_a_name(spec: str) -> None:
    name = "xquant_" + spec.replace("_", "__").replace("-", "_")
    assert dtype.is_ours(name) and dtype.spec_of(name) == spec
    assert parse_method(spec).spec


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("xquant_kivi_4bit", "kivi-4bit"),
        ("xquant_xquant_4bit", "xquant-4bit"),
        ("xquant_q4__0", "q4_0"),
        ("xquant_kvquant_3bit_1%", "kvquant-3bit-1%"),
        ("xquant_kivi_4bit:tail=32", "kivi-4bit:tail=32"),
    ],
)
def test_names_are_those_of_the_documentation(name: str, spec: str) -> None:
    assert dtype.spec_of(name) == spec


@pytest.mark.parametrize("name", ["auto", "fp8", "turboquant_4bit_nc", "xquant", "XQUANT_kivi_4bit", None])
def test_names_of_others_are_theirs(name: Any, registry: Registry) -> None:
    args = arguments(name)
    dtype.prepare(args)
    dtype.make_known(configuration(name))
    assert not registry.handlers and not args.kv_cache_dtype_skip_layers
    assert dtype.name_in(args) == dtype.name_in(configuration(name)) == ""


def test_without_a_registry_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, ModuleType("vllm.config.cache"))
    args = arguments()
    dtype.prepare(args)
    dtype.make_known(configuration())
    assert vars(args) == vars(arguments())
    assert dtype.registry() is None and dtype.name_in(args) == ""


def test_a_name_that_is_asked_for_is_registered(registry: Registry) -> None:
    args = arguments()
    for _ in range(2):  # a second engine, from the same arguments
        dtype.prepare(args)
    assert list(registry.handlers) == [NAME] and args.kv_cache_dtype == NAME
    assert registry.storage[NAME] is torch.uint8
    assert registry.handlers[NAME].quant_mode() is KVQuantMode.NONE
    assert args.kv_cache_dtype_skip_layers == ["sliding_window"]
    dtype.prepare(arguments("xquant_tc_2bit"))
    assert [each.name for each in registry.handlers.values()] == [NAME, "xquant_tc_2bit"]


def test_it_is_registered_in_each_process(registry: Registry) -> None:
    for _ in range(2):
        dtype.make_known(configuration())
    assert list(registry.handlers) == [NAME]


def test_a_name_says_the_method() -> None:
    store = {"xquant_attend": "store"}
    assert dtype.joined(store, NAME) == {"xquant": "kivi-4bit", **store}
    assert dtype.joined(store, "") == store and dtype.joined({}, "") == {}


def test_both_ways_may_say_the_same() -> None:
    asked = {"xquant": "kivi-4bit:group=128", "xquant_attend": "store"}
    assert dtype.joined(asked, NAME) == asked


def _refused(why: str, call: Any, *given: Any) -> None:
    with pytest.raises(ValueError, match=f"^xquant: {why}") as error:
        call(*given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("other", ["tc-2bit", "kivi-2bit", "kivi-4bit:tail=32"])
def test_two_methods_are_refused(other: str) -> None:
    why = f"kv_cache_dtype={NAME} is kivi-4bit, and additional_config says xquant={other}: leave one"
    _refused(why, dtype.joined, {"xquant": other}, NAME)


def test_what_is_no_method_is_refused() -> None:
    _refused("'kivi-4bits' is not how kivi is written", dtype.joined, {}, "xquant_kivi_4bits")
    _refused("unknown method 'kiwi-4bit'.* did you mean", dtype.joined, {}, "xquant_kiwi_4bit")
    _refused("unknown method ''", dtype.joined, {}, "xquant_")
    _refused("kivi has no option 'depth=3'", dtype.joined, {}, f"{NAME}:depth=3")
    _refused("the method is a spec string, not NoneType", dtype.joined, {"xquant": None}, NAME)


def test_a_name_that_is_taken_is_refused(registry: Registry) -> None:
    class Other:
        name = NAME

        def torch_dtype(self) -> torch.dtype:
            return torch.int8

    registry.register_kv_cache_dtype(NAME)(Other)
    for call, given in ((dtype.prepare, arguments()), (dtype.make_known, configuration())):
        _refused(f"the KV cache dtype '{NAME}' is taken by another plugin", call, given)


def test_layers_that_are_left_out_are_refused(registry: Registry) -> None:
    args = arguments()
    args.kv_cache_dtype_skip_layers = ["0"]
    _refused("kv_cache_dtype_skip_layers is not served yet", dtype.prepare, args)
    assert not registry.handlers


class TestWithVllm:
    """In 0.32, which has no registry."""

    @pytest.fixture(autouse=True)
    def vllm(self) -> None:
        pytest.importorskip("vllm")

    @pytest.fixture
    def tiny(self, tmp_path: Path) -> Path:
        from support.vllm_engines import save_tiny

        return save_tiny(tmp_path)

    @pytest.mark.parametrize("additional", [{}, {"xquant": "kivi-4bit"}])
    def test_vllm_itself_refuses_the_name(self, additional: dict[str, str], tiny: Path) -> None:
        from support.vllm_engines import configured

        with pytest.raises(ValueError, match="cache_dtype") as error:
            configured(tiny, kv_cache_dtype=NAME, additional_config=additional)
        assert not str(error.value).startswith("xquant: ")

    def test_its_command_line_does(self, capsys: pytest.CaptureFixture[str]) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        with pytest.raises(SystemExit):
            parser.parse_args(["--kv-cache-dtype", NAME])
        assert "invalid choice" in capsys.readouterr().err

    def test_another_version_is_refused(self, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.engine.arg_utils import EngineArgs

        from support.vllm_engines import configured

        configured(tiny)  # with the plugin that is wrapped then
        monkeypatch.setattr(EngineArgs, "create_engine_config", EngineArgs.create_engine_config)
        monkeypatch.setattr(guard, "version", lambda: "0.33.0")
        guard.install()
        args = EngineArgs(model=str(tiny), kv_cache_dtype=NAME, skip_tokenizer_init=True)  # type: ignore
        _refused("vLLM 0.32 is supported, and 0.33.0 is installed", args.create_engine_config)

    def test_what_is_wanted_is_read_from_both(self, registry: Registry) -> None:
        from xquant_vllm.checks import wanted_of

        for made in (arguments, configuration):
            wanted = wanted_of(made(xquant_attend="store"))
            assert wanted is not None and (wanted.method.spec, wanted.attend) == ("kivi-4bit", "store")
            assert wanted_of(made("auto")) is None

    def test_a_checkpoint_with_a_dtype_of_its_own_is_seen(self, registry: Registry) -> None:
        """vLLM lets a dtype that is named go before it: what is refused without a name stays so."""
        from xquant_vllm.checks import _own_dtype

        for scheme, found in ((None, "auto"), ("FP8", "fp8_e4m3")):
            config = configuration()
            quantized = {"quant_method": "modelopt", "kv_cache_quant_algo": scheme}
            config.model_config = SimpleNamespace(hf_config=SimpleNamespace(quantization_config=quantized))
            assert _own_dtype(config) == found

    def test_processes_know_it_before_they_make_anything(self, registry: Registry) -> None:
        from xquant_vllm import seam

        for hook in (seam._told, seam._scheduled):
            registry.__init__()  # type: ignore[misc]
            seen: list[list[str]] = []
            hook(lambda *_, seen=seen: seen.append(list(registry.handlers)), None, configuration())
            assert seen == [[NAME]]


REAL = """
import sys
from pathlib import Path
from types import SimpleNamespace

import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = vllm.platforms.current_platform = CpuPlatform()
from vllm.config import cache
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.kv_cache_interface import KVQuantMode, get_kv_quant_mode, is_quantized_kv_cache

import xquant_vllm
from support.vllm_engines import configured, save_mixed
from xquant_vllm import dtype, guard

sources, name, folder = sys.argv[1:]
assert Path(cache.__file__).is_relative_to(sources), cache.__file__
assert isinstance(type("Named", (dtype.Pages,), {"name": name})(), cache.KVCacheDTypeHandler)
try:
    cache.CacheConfig(cache_dtype=name)
except ValueError as error:
    assert "Invalid kv_cache_dtype" in str(error)
else:
    raise AssertionError("it is known before it is asked for")

parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
assert parser.parse_args(["--kv-cache-dtype", name]).kv_cache_dtype == name

# As if this version were the one that is supported: all that is done before a model is loaded.
xquant_vllm.VERSION = guard.VERSION = "0.33"
guard.version = lambda: "0.33.0"
config = configured(save_mixed(Path(folder)), kv_cache_dtype=name)
own = config.cache_config
assert (own.cache_dtype, own.block_size, own.kv_cache_dtype_skip_layers) == (name, 128, ["sliding_window"])
assert cache.CacheConfig(cache_dtype=name).cache_dtype == name
assert str(STR_DTYPE_TO_TORCH_DTYPE[name]) == "torch.uint8"
assert get_kv_quant_mode(name) is KVQuantMode.NONE and not is_quantized_kv_cache(name)
from xquant_vllm.checks import wanted_of

assert wanted_of(config).method.spec == "kivi-4bit:tail=32"
for other in ({"additional_config": {"xquant": "tc-2bit"}}, {"kv_cache_dtype_skip_layers": ["0"]}):
    try:
        configured(Path(folder), kv_cache_dtype=name, **other)
    except ValueError as error:
        assert str(error).startswith("xquant: ") and "\\n" not in str(error), error
    else:
        raise AssertionError(other)
print("all of it")
"""


@pytest.mark.skipif(not SOURCES, reason="XQUANT_VLLM_033 names no folder with vLLM 0.33's sources")
def test_the_registry_of_vllm_itself(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    found = os.pathsep.join([SOURCES, *filter(None, sys.path)])
    command = [sys.executable, "-c", REAL, SOURCES, f"{NAME}:tail=32", str(tmp_path)]
    ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": found}, capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stdout.endswith("all of it\n"), ran.stderr[-4000:]
