"""The connector in vLLM: another engine goes on from what one has stored."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from prometheus_client import REGISTRY

from support.processes import TESTS
from support.vllm_engines import answers, calibrated, engine, hits, kept, random_prompts, save_tiny

LONG = [300, 400, 129, 90]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def seconds(name: str) -> float:
    """`hits` gives whole numbers."""
    found = [each for metric in REGISTRY.collect() for each in metric.samples]
    return sum(each.value for each in found if each.name == f"vllm:xquant_{name}_seconds_total")


def test_another_engine_reads_what_one_has_stored(tiny: Path, tmp_path: Path) -> None:
    """Pages as they are: it answers as one that finds the prefixes in its own memory."""
    prompts = random_prompts(LONG, seed=3)
    with engine(tiny, "kivi-4bit", **kept(tmp_path / "s", limit=1_000_000_000)) as llm:
        first = answers(llm, prompts, 140)
        assert hits(llm) == 0
        again = answers(llm, prompts, 140)  # of its own memory
        assert hits(llm, "prefix_cache_hits") == 256 + 384 + 128
        files = {file.name: file.stat().st_size for file in (tmp_path / "s").glob("*.safetensors")}
        assert hits(llm, "xquant_blocks_stored") == len(files) and not hits(llm, "xquant_blocks_left_out")
        assert 0 <= sum(files.values()) - hits(llm, "xquant_bytes_stored") < 300 * len(files)  # headers
        assert hits(llm, "xquant_blocks_missed") == 2 + 3 + 1 and not hits(llm, "xquant_blocks_loaded")
        assert seconds("pack") > 0
        assert hits(llm, "xquant_room_bytes") == 1_000_000_000 - sum(files.values())
    assert len(files) >= 2 + 3 + 1 + 4  # whole blocks of prompts and of what was generated
    with engine(tiny, "kivi-4bit", **kept(tmp_path / "s")) as llm:
        assert answers(llm, prompts, 140) == again
        assert hits(llm) == 256 + 384 + 128
        assert hits(llm, "xquant_blocks_loaded") == 2 + 3 + 1 and not hits(llm, "xquant_blocks_missed")
        assert hits(llm, "xquant_bytes_loaded") > 0 and seconds("unpack") > 0
        longer = [prompt + found for prompt, found in zip(prompts, first, strict=True)]
        answers(llm, longer, 4)
    assert {file.name for file in (tmp_path / "s").glob("*.safetensors")} >= files.keys()


ELSEWHERE = """
import json, sys
from pathlib import Path
from support.vllm_engines import answers, engine, hits, kept, random_prompts
from test_connector import LONG
folder, store, spec, method, calibration = sys.argv[1:]
options = kept(Path(store), method=method, calibration=calibration)
with engine(Path(folder), spec, **options) as llm:
    found = answers(llm, random_prompts(LONG, seed=3), 24)
    print("\\n" + json.dumps([found, hits(llm)]))
"""


@pytest.mark.parametrize("method", ["tc-2bit", "tc-cl-2bit"])
def test_another_process_reads_what_was_recoded(method: str, tiny: Path, tmp_path: Path) -> None:
    import json

    words = torch.tensor(random_prompts([128] * 16, seed=11))
    _, file = calibrated(tiny, method, words, tmp_path)
    given = [str(tiny), str(tmp_path / "s"), "full", method, file]
    paths = os.pathsep.join(map(str, (Path(__file__).parent, TESTS)))
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", ELSEWHERE, *given],
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(json.loads(done.stdout.strip().splitlines()[-1]))
    assert found[0][1] == 0 and found[1][1] == 256 + 384 + 128
    sizes = [entry.stat().st_size for entry in (tmp_path / "s").glob("*.safetensors")]
    whole = 128 * 4 * 2 * 2 * 32 * 4  # a block of four layers in fp32
    assert max(sizes) < whole / 5


def test_a_block_that_is_damaged_or_gone_is_computed(tiny: Path, tmp_path: Path) -> None:
    prompts = random_prompts([300], seed=3)
    with engine(tiny, "full", **kept(tmp_path / "s")) as llm:
        want = answers(llm, prompts, 4)
    files = sorted((tmp_path / "s").glob("*.safetensors"))
    assert len(files) == 2
    for file in files:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        with engine(tiny, "full", **kept(tmp_path / "s")) as llm:
            with pytest.warns(UserWarning, match="is damaged"):
                assert answers(llm, prompts, 4) == want
            assert hits(llm) in (0, 128) and hits(llm, "xquant_blocks_damaged") == 1
    assert len(list((tmp_path / "s").glob("*.safetensors"))) == 2


def test_a_block_that_is_dropped_after_it_was_found_is_read(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has a limit, too. vLLM would end the engine where such a block cannot be loaded."""
    from xquant_vllm.connector import XQuantConnector

    prompts, load = random_prompts([300, 400], seed=3), XQuantConnector.start_load_kv
    with engine(tiny, "full", **kept(tmp_path / "s")) as llm:
        want = answers(llm, prompts, 4)

    def dropped(connector: Any, *given: Any, **more: Any) -> None:
        for file in (tmp_path / "s").glob("*.safetensors"):
            file.unlink()
        load(connector, *given, **more)

    monkeypatch.setattr(XQuantConnector, "start_load_kv", dropped)
    with engine(tiny, "full", **kept(tmp_path / "s")) as llm:
        assert answers(llm, prompts, 4) == want
        assert hits(llm) >= 256 and hits(llm, "xquant_blocks_loaded") >= 2


def test_what_another_method_read_is_not_found(tiny: Path, tmp_path: Path) -> None:
    """States of a 2-bit engine are no states of a full one, however they are stored."""
    prompts = random_prompts([400], seed=3)
    with engine(tiny, "full") as llm:
        want = answers(llm, prompts, 16)
    for spec, found in (("kivi-2bit", 0), ("full", 0), ("full", 384)):
        with engine(tiny, spec, **kept(tmp_path / "s", method="full")) as llm:
            got = answers(llm, prompts, 16)
            assert hits(llm) == found
        assert spec != "full" or got == want


def test_the_limit_holds(tiny: Path, tmp_path: Path) -> None:
    prompts = random_prompts([600] * 3, seed=5)
    with engine(tiny, "kivi-4bit", **kept(tmp_path / "s", limit="300KB")) as llm:
        for prompt in prompts:
            answers(llm, [prompt], 4)
            held = [entry.stat().st_size for entry in (tmp_path / "s").glob("*.safetensors")]
            assert 0 < sum(held) <= 300_000


def test_a_disk_that_fails_stops_nobody(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers as it does without a folder, and goes on storing when it can."""
    folder, prompts, written = tmp_path / "s", random_prompts([300] * 4, seed=3), Path.write_bytes

    def half(path: Path, data: bytes) -> int:
        written(path, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with engine(tiny, "full") as llm:
        want = [answers(llm, [prompt], 4) for prompt in prompts]
    with engine(tiny, "full", **kept(folder)) as llm:
        with monkeypatch.context() as patch, pytest.warns(RuntimeWarning, match="No space left") as told:
            patch.setattr(Path, "write_bytes", half)
            assert [answers(llm, [prompt], 4) for prompt in prompts[:2]] == want[:2]
        assert sum("No space left" in str(each.message) for each in told) == 1
        assert [file.name for file in folder.iterdir()] == [".lock"]
        assert hits(llm, "xquant_blocks_left_out") == 4 and not hits(llm, "xquant_blocks_stored")
        assert answers(llm, prompts[2:3], 4) == want[2]
        assert len(list(folder.glob("*.safetensors"))) == 2
        shutil.rmtree(folder)
        assert answers(llm, prompts[3:], 4) == want[3]
        assert len(list(folder.glob("*.safetensors"))) == 2


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        ("kivi-4bit", {"method": "no-such"}, "unknown method"),
        ("kivi-4bit", {"method": "tc-2bit:group=32"}, "blocks of tc-2bit:group=32 have 32 tokens"),
        ("kivi-4bit", {"method": "pyramid-50%"}, "pyramid"),
        ("kivi-4bit", {"limit": "much"}, "is no size"),
        ("kivi-4bit", {"paths": "x"}, "no option 'paths'"),
        ("kivi-4bit", {"path": ""}, "needs the 'path'"),
        ("kivi-4bit", {"every": "often"}, "'every' is a number of tokens"),
        ("kivi-4bit", {"state_bits": 4}, "one of 8, 16, 32"),
        ("kivi-4bit", {"method": "tc-2bit"}, "needs a calibration"),
        (None, {}, "needs a method"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    spec: str | None, options: dict[str, Any], words: str, tiny: Path, tmp_path: Path
) -> None:
    with (
        pytest.raises(ValueError, match=words),
        engine(tiny, spec, **kept(tmp_path, **options)),
    ):
        pass


def test_another_connector_is_refused(tiny: Path) -> None:
    other = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    with (
        pytest.raises(ValueError, match="a KV connector other than XQuantConnector"),
        engine(tiny, "kivi-4bit", kv_transfer_config=other),
    ):
        pass
