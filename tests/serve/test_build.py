"""Codecs that an engine serves: of shards, of what is computed from weights, and of calibrations."""

from pathlib import Path
from typing import Any

import pytest
import torch

from support.caches import calibration
from support.models import tiny
from xquant import parse_method
from xquant.models import view_model
from xquant.past.packer import TORCH
from xquant.past.sealing import pack_rows
from xquant.past.stream import Stream
from xquant.serve import fit
from xquant.serve.build import Model, codecs_of, shard_of

BLOCK = 32


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", head_dim=48, hidden_size=96)


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    model.save_pretrained(found)
    return found


def _decoded(codec: Any, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that come back of ``[T, W]``."""
    rows = states.unflatten(0, (-1, BLOCK))
    stream = Stream(codec.segments, BLOCK, TORCH)
    stream.seal(pack_rows([stream], [codec.encode(rows[None], None)[0]], None)[0], 1)
    read = codec.recall(stream.read(torch.float32, len(states)), None, sealing=False)
    keys, values = codec.rebuild(read)
    return keys[0], values[0]


@pytest.mark.parametrize("spec", ["kivi-4bit:group=32", "int3-gs40:group=32", "nf4:group=32"])
def test_shards_make_the_codes_of_one_process(model: Any, spec: str) -> None:
    torch.manual_seed(0)
    method, layers = parse_method(spec), view_model(model).compressed
    (whole, *_) = codecs_of(method, layers, None, at_heads=True)
    width = layers[0].kv_width
    key, value = torch.randn(2, 2 * BLOCK, width)
    keys, values = _decoded(whole, torch.cat([key, value], -1))
    for rank in range(2):
        (part, *_) = codecs_of(method, shard_of(layers, rank, 2), None, at_heads=True)
        own = slice(rank * width // 2, (rank + 1) * width // 2)
        found = _decoded(part, torch.cat([key[:, own], value[:, own]], -1))
        assert torch.equal(found[0], keys[:, own]) and torch.equal(found[1], values[:, own])


def test_heads_that_cannot_be_divided_are_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="cannot be divided by 3"):
        shard_of(view_model(model).compressed, 0, 3)


@pytest.mark.parametrize("shards", [1, 2])
def test_latents_are_had_of_keys_and_values(model: Any, folder: Path, shards: int) -> None:
    """At 16 bits nothing is lost; at 8 little."""
    torch.manual_seed(1)
    given = Model(model.config, torch.float32, str(folder), shards)
    x = torch.randn(2 * BLOCK, model.config.hidden_size)
    for bits, error in ((16, 1e-4), (8, 2e-2)):
        wanted = fit.wanted({"xquant": f"xquant-{bits}bit:group=32,form=gqa"})
        for rank in range(shards):
            (codec, *_) = fit.codecs_for(wanted, given, None, rank)
            key, value = (part[0] for part in codec.view.project(x[None]))
            found = _decoded(codec, torch.cat([key, value], -1))
            for back, exact in zip(found, (key, value), strict=True):
                assert (back - exact).norm() < error * exact.norm()


def test_blocks_are_of_the_whole_checkpoint(model: Any, folder: Path, tmp_path: Path) -> None:
    """Each of these was taken for another's: an MLP, an epsilon, a scaling of RoPE."""
    own = Model(model.config, torch.float32, str(folder)).identity
    sizes = {"head_dim": 48, "hidden_size": 96}
    other = tiny("llama", **sizes)
    other.save_pretrained(tmp_path / "again")
    assert Model(other.config, torch.float32, str(tmp_path / "again")).identity == own
    other.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1
    other.save_pretrained(tmp_path / "mlp")
    assert Model(other.config, torch.float32, str(tmp_path / "mlp")).identity != own
    scaled = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    for change in ({"rms_norm_eps": 1e-3}, {"rope_parameters": scaled}):
        config = tiny("llama", **sizes, **change).config
        assert Model(config, torch.float32, str(folder)).identity != own
    for kind in ("bin", "gguf"):
        (tmp_path / kind).mkdir()
        file, found = tmp_path / kind / f"model.{kind}", set()
        for content in (b"0", b"1", b"1"):
            file.write_bytes(content)
            found.add(Model(model.config, torch.float32, str(file.parent)).identity)
        assert len(found) == 2
    with pytest.raises(ValueError, match="no weights in 'a name'"):
        _ = Model(model.config, torch.float32, "a name").identity


def test_blocks_are_of_what_states_were_read_through(model: Any, folder: Path, tmp_path: Path) -> None:
    """Also of the engine's own method: states of later tokens and layers are computed from what was read."""
    given = Model(model.config, torch.float32, str(folder))
    found, file = calibration(model, "tc-2bit"), tmp_path / "tc.safetensors"
    assert found is not None
    found.save(file)
    found.save(tmp_path / "same.safetensors")
    calibrated = {"xquant": "tc-2bit", "xquant_calibration": str(file)}
    engines: list[dict[str, Any]] = [
        {"xquant": "full"},
        {"xquant": "kivi-2bit"},
        {"xquant": "kivi-2bit:sink=2"},
        {"xquant": "full", "xquant_attend": "store"},
        {"xquant": "full", "xquant_ranges": "heads"},
        calibrated,
    ]
    identities = [_identity(engine, given) for engine in engines]
    assert len(set(identities)) == len(engines)
    assert identities == [_identity(engine, given) for engine in engines]
    for own in ({"xquant_kernel": "reference"}, {"xquant_attend": "chunk"}):
        assert _identity({"xquant": "full", **own}, given) == identities[0]
    assert (
        _identity({**calibrated, "xquant_calibration": str(tmp_path / "same.safetensors")}, given)
        == identities[-1]
    )


def _identity(engine: dict[str, Any], model: Model) -> str:
    return str(fit.connector_options({"path": "x", "method": "full"}, fit.wanted(engine)).identity(model))


def test_calibrations_are_read_for_their_model(model: Any, folder: Path, tmp_path: Path) -> None:
    found = calibration(model, "tc-2bit")
    assert found is not None
    file = tmp_path / "tc.safetensors"
    found.save(file)
    wanted = fit.wanted({"xquant": "tc-2bit", "xquant_calibration": str(file)})
    given = Model(model.config, torch.float32, str(folder))
    fit.check_model(wanted, given)
    (codec, *_) = fit.codecs_for(wanted, given, None, 0)
    assert codec.calibrated == "" and len(codec.segments) == 1

    other = tiny("llama", head_dim=48, hidden_size=96, num_hidden_layers=2)
    other.save_pretrained(tmp_path / "other")
    for why, config, place in (
        ("made on another model", other.config, tmp_path / "other"),
        ("no 'model.layers.0.self_attn.k_proj.weight'", model.config, tmp_path / "nowhere"),
    ):
        with pytest.raises(ValueError, match=why) as refused:
            fit.check_model(wanted, Model(config, torch.float32, str(place)))
        assert str(refused.value).startswith("xquant: ") and "\n" not in str(refused.value)


@pytest.mark.parametrize("outliers", ["", "-4%"])
def test_calibrations_are_cut_by_head(model: Any, folder: Path, tmp_path: Path, outliers: str) -> None:
    torch.manual_seed(3)
    spec = f"kvquant-3bit{outliers}:sink=0,group=32"
    found, file = calibration(model, spec), tmp_path / "kvquant.safetensors"
    assert found is not None
    found.save(file)
    options = {"xquant": spec, "xquant_calibration": str(file), "xquant_ranges": "heads"}
    wanted, place = fit.wanted(options), str(folder)
    (whole, *_) = fit.codecs_for(wanted, Model(model.config, torch.float32, place), None, 0)
    width = whole.view.kv_width
    key, value = torch.randn(2, BLOCK, width)
    keys, values = _decoded(whole, torch.cat([key, value], -1))
    for rank in range(2):
        (part, *_) = fit.codecs_for(wanted, Model(model.config, torch.float32, place, 2), None, rank)
        own = slice(rank * width // 2, (rank + 1) * width // 2)
        back = _decoded(part, torch.cat([key[:, own], value[:, own]], -1))
        assert torch.equal(back[0], keys[:, own]) and torch.equal(back[1], values[:, own])


def test_calibrations_of_all_heads_are_not_cut(model: Any, folder: Path, tmp_path: Path) -> None:
    found, file = calibration(model, "tc-2bit"), tmp_path / "tc.safetensors"
    assert found is not None
    found.save(file)
    wanted = fit.wanted({"xquant": "tc-2bit", "xquant_calibration": str(file)})
    with pytest.raises(ValueError, match="of all heads together"):
        fit.check_model(wanted, Model(model.config, torch.float32, str(folder), 2))


@pytest.mark.parametrize(
    ("spec", "file", "shards", "why"),
    [
        ("tc-2bit", "none.safetensors", 1, "there is no calibration file"),
        ("kvquant-3bit", None, 1, "xquant_calibration=FILE"),
        ("kivi-4bit", "none.safetensors", 1, "needs no calibration"),
        ("xquant-4bit:form=mha", None, 1, "layer inputs"),
        ("kivi-4bit", None, 3, "cannot be divided by 3"),
    ],
)
def test_what_cannot_be_built_is_refused(
    model: Any, folder: Path, spec: str, file: str | None, shards: int, why: str
) -> None:
    wanted = fit.wanted({"xquant": spec} | ({"xquant_calibration": file} if file else {}))
    with pytest.raises(ValueError, match=why) as refused:
        fit.check_model(wanted, Model(model.config, torch.float32, str(folder), shards))
    assert str(refused.value).startswith("xquant: ") and "\n" not in str(refused.value)
