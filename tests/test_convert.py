"""The conversion engine: files of a chosen size, several layers at once, going on after an interruption."""

from __future__ import annotations

import json
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checkpoint_maker import gptq_config, gptq_layer, write_model, write_shards
from helpers import random_codes, random_scales
from safetensors import safe_open
from safetensors.numpy import save_file

from marlin_jit.errors import CheckpointError, ValueRangeError
from marlin_jit.formats import (
    ReadOptions,
    compare,
    convert,
    load,
    open_checkpoint,
    pack_checkpoint,
    plan_pack,
    publish,
    run_pack,
    targets,
)
from marlin_jit.formats.unpack import plan_unpack
from marlin_jit.pack import dequantize

NAMES = [f"model.layers.{i}.{part}" for i in range(4) for part in ("q_proj", "up_proj")]


def model(folder: Path, rng: np.random.Generator, K: int = 128, N: int = 64, files: int = 3) -> Path:
    """A GPTQ model of eight layers and two other tensors in several files."""
    everything = {
        "model.norm.weight": np.arange(K, dtype=np.float16),
        "model.embed.weight": np.ones((9, K), np.float32),
    }
    for name in NAMES:
        zero_point = rng.integers(0, 16, (K // 32, N), dtype=np.uint8)
        layer = gptq_layer(random_codes(rng, K, N), random_scales(rng, K // 32, N), zero_point)
        everything |= {f"{name}.{key}": array for key, array in layer.items()}
    write_model(folder, gptq_config(checkpoint_format="gptq_v2"), {}, everything)
    if files > 1:
        (folder / "model.safetensors").unlink()
        names, step = list(everything), -(-len(everything) // files)
        write_shards(
            folder,
            {
                f"model-{i + 1:05d}-of-{files:05d}.safetensors": {
                    name: everything[name] for name in names[i * step : (i + 1) * step]
                }
                for i in range(files)
            },
        )
    return folder


def tensors(folder: Path) -> dict[str, bytes]:
    """Every tensor of a folder, by name, as bytes; each must be in one file only."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118
                assert name not in found
                found[name] = file.get_tensor(name).tobytes()
    return found


def no_bytes(count: int) -> None:
    """Progress that nobody watches."""


# ---- files of a chosen size ------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_size", [1, 20_000, 45_000, 10**9])
def test_a_chosen_shard_size(tmp_path: Path, rng: np.random.Generator, shard_size: int) -> None:
    source = model(tmp_path / "m", rng)
    pack_checkpoint(source, tmp_path / "plain")
    plan = plan_pack(source, tmp_path / "out", shard_size=shard_size)
    run_pack(plan)
    assert tensors(tmp_path / "out") == tensors(tmp_path / "plain")
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    units = len(NAMES) + 2
    if shard_size == 1:
        assert len(files) == units
    for name in files:
        with safe_open(tmp_path / "out" / name, framework="np") as file:
            size = sum(file.get_tensor(t).nbytes for t in file.keys())  # noqa: SIM118
            layers = json.loads(file.metadata()["layers"])
        assert size <= shard_size or len(layers) <= 1
    if len(files) == 1:
        assert files == ["model.safetensors"]
    else:
        assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(map(len, tensors(tmp_path / "out").values()))
    assert set(index["weight_map"]) == set(tensors(tmp_path / "out"))
    assert set(load(tmp_path / "out")) == set(NAMES)


def test_a_single_file_is_not_divided(tmp_path: Path, rng: np.random.Generator) -> None:
    source = model(tmp_path / "m", rng, files=1) / "model.safetensors"
    with pytest.raises(CheckpointError, match="is one file, which a shard size would divide"):
        plan_pack(source, tmp_path / "out.safetensors", shard_size=1000)


def test_metadata_of_new_files_is_what_their_sources_agree_on(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    everything = {f"x{i}": np.full(1000, i, np.float16) for i in range(4)}
    layer = gptq_layer(random_codes(rng, 32, 64), random_scales(rng, 1, 64), np.full((1, 64), 8, np.uint8))
    write_model(tmp_path / "m", gptq_config(checkpoint_format="gptq_v2"), {}, everything)
    (tmp_path / "m/model.safetensors").unlink()
    files = {
        "model-00001-of-00002.safetensors": {"x0": everything["x0"], "x1": everything["x1"]},
        "model-00002-of-00002.safetensors": {f"a.{key}": value for key, value in layer.items()}
        | {"x2": everything["x2"]},
    }
    write_shards(tmp_path / "m", files)
    for number, name in enumerate(files):
        save_file(files[name], tmp_path / "m" / name, {"author": "somebody", "file": str(number)})
    run_pack(plan_pack(tmp_path / "m", tmp_path / "out", shard_size=5000))
    for path in sorted((tmp_path / "out").glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            names, metadata = set(file.keys()), file.metadata()
        assert metadata["author"] == "somebody"
        numbers = {str(i) for i, tensors in enumerate(files.values()) for n in tensors if n in names}
        if "a.B" in names:
            numbers.add("1")
        assert metadata.get("file") == (numbers.pop() if len(numbers) == 1 else None)


# ---- several layers at once ------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", [2, 3, 20])
def test_jobs_change_no_byte(tmp_path: Path, rng: np.random.Generator, jobs: int) -> None:
    source = model(tmp_path / "m", rng)
    pack_checkpoint(source, tmp_path / "one")
    done: list[int] = []
    plan = plan_pack(source, tmp_path / "many")
    run_pack(plan, done.append, jobs=jobs)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "many" / path.name).read_bytes()
    assert sum(done) == plan.bytes_before


def test_an_error_in_one_of_several_jobs_leaves_nothing(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = model(tmp_path / "m", rng)
    interrupt(monkeypatch, after=3, error=CheckpointError("in the middle"))
    with pytest.raises(CheckpointError, match="in the middle"):
        run_pack(plan_pack(source, tmp_path / "out"), jobs=4)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("jobs", [1, 3])
def test_every_job_works_on_the_current_gpu(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    """Which GPU is current is kept by thread, as CuPy keeps it; here there is none, and packing notes it."""
    current = threading.local()
    used: list[int] = []

    class Device:
        def __init__(self) -> None:
            self.id = getattr(current, "id", 0)

        def use(self) -> None:
            current.id = self.id

    def noted(layer: Any, device: bool) -> Any:
        used.append(Device().id)
        return REAL(layer, False)

    cupy = SimpleNamespace(cuda=SimpleNamespace(Device=Device))
    monkeypatch.setattr(convert, "import_cupy", lambda: cupy)
    monkeypatch.setattr(targets, "to_marlin", noted)
    current.id = 1
    run_pack(plan_pack(model(tmp_path / "m", rng), tmp_path / "out"), jobs=jobs, device=True)
    assert used == [1] * len(NAMES)


def test_memory_is_that_of_the_jobs_and_not_of_the_model(tmp_path: Path, rng: np.random.Generator) -> None:
    K, N = 1024, 1024
    source = model(tmp_path / "m", rng, K, N)
    for jobs in (1, 2):
        plan = plan_pack(source, tmp_path / f"out{jobs}")
        tracemalloc.start()
        run_pack(plan, jobs=jobs)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        # Codes, words before and after, scales and zeros of groups of 32; half a MB besides.
        assert peak < jobs * 3 * K * N + 5e5


def test_memory_of_dense_layers(tmp_path: Path, rng: np.random.Generator) -> None:
    K, N = 1024, 1024
    plan = plan_unpack(model(tmp_path / "m", rng, K, N), tmp_path / "out", "float16")
    tracemalloc.start()
    run_pack(plan)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Codes, weights in both orders, and which of them are finite; half a MB besides.
    assert peak < 6 * K * N + 5e5


# ---- going on --------------------------------------------------------------------------------------------


REAL = targets.to_marlin


def interrupt(monkeypatch: pytest.MonkeyPatch, after: int, error: BaseException | None = None) -> list[str]:
    """Let packing fail after some layers. Returns the names of layers packed, as they are."""
    done: list[str] = []

    def counted(layer: Any, device: bool) -> Any:
        if error is not None and len(done) == after:
            raise error
        done.append(layer.name)
        return REAL(layer, device)

    monkeypatch.setattr(targets, "to_marlin", counted)
    return done


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_finished_files_are_not_made_again(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    source = model(tmp_path / "m", rng)
    pack_checkpoint(source, tmp_path / "plain")
    interrupt(monkeypatch, after=5, error=error)
    with pytest.raises((KeyboardInterrupt, CheckpointError)):
        run_pack(plan_pack(source, tmp_path / "out"), resumable=True)
    assert not (tmp_path / "out").exists()
    (kept,) = tmp_path.glob(".out.*")
    whole = {path.name for path in kept.glob("*.safetensors")}
    assert 0 < len(whole) < 3
    done = interrupt(monkeypatch, after=0)
    count: list[int] = []
    plan = plan_pack(source, tmp_path / "out")
    run_pack(plan, count.append, resumable=True)
    assert set(done) == {
        name for shard in plan.shards if shard not in whole for name in plan.layers_in(shard)
    }
    assert sum(count) == plan.bytes_before
    names = {path.name for path in (tmp_path / "plain").iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    for name in names:
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    assert not list(tmp_path.glob(".out.*"))


def change_source(source: Path) -> dict[str, Any]:
    path = sorted(source.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes())  # the same bytes, but who knows
    return {}


@pytest.mark.filterwarnings("ignore::marlin_jit.formats.CheckpointWarning")
@pytest.mark.parametrize(
    "change",
    [
        change_source,
        lambda source: {"shard_size": 20_000},
        lambda source: {"exclude": [NAMES[0]]},
        lambda source: {"options": ReadOptions(zero_format="v1")},
    ],
    ids=["source", "shard size", "patterns", "options"],
)
def test_files_of_another_plan_are_not_taken_over(
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], dict[str, Any]],
) -> None:
    source = model(tmp_path / "m", rng)
    interrupt(monkeypatch, after=6, error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run_pack(plan_pack(source, tmp_path / "out"), resumable=True)
    settings = change(source)
    done = interrupt(monkeypatch, after=0)
    plan = plan_pack(source, tmp_path / "out", **settings)
    run_pack(plan, resumable=True)
    packed = {name for name, layer in plan.layers.items() if isinstance(layer.target, targets.PackedTarget)}
    assert set(done) == packed


def test_damaged_files_are_made_again(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = model(tmp_path / "m", rng)
    pack_checkpoint(source, tmp_path / "plain")
    interrupt(monkeypatch, after=7, error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run_pack(plan_pack(source, tmp_path / "out"), resumable=True)
    (kept,) = tmp_path.glob(".out.*")
    for path in kept.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    (kept / "stray").mkdir()
    (kept / "stray/file").write_text("x")
    done = interrupt(monkeypatch, after=0)
    run_pack(plan_pack(source, tmp_path / "out"), resumable=True)
    assert set(done) == set(NAMES)
    assert tensors(tmp_path / "out") == tensors(tmp_path / "plain")
    assert not (tmp_path / "out/stray").exists()


def test_two_runs_do_not_write_one_output(tmp_path: Path, rng: np.random.Generator) -> None:
    pytest.importorskip("fcntl")
    source = model(tmp_path / "m", rng)
    second: list[Exception] = []

    def meanwhile(count: int) -> None:
        if not second:
            try:
                run_pack(plan_pack(source, tmp_path / "out"), resumable=True)
            except CheckpointError as error:
                second.append(error)

    run_pack(plan_pack(source, tmp_path / "out"), meanwhile, resumable=True)
    assert "another run is writing there" in str(second[0])
    assert set(load(tmp_path / "out")) == set(NAMES)


def test_complete_output_that_cannot_be_put_in_place_is_kept(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = model(tmp_path / "m", rng), tmp_path / "out"
    plan = plan_pack(source, out)

    def appear(count: int) -> None:
        out.mkdir(exist_ok=True)
        (out / "thesis").write_text("x")

    with pytest.raises(CheckpointError, match="appeared while this was being written"):
        run_pack(plan, appear, resumable=True)
    out.rename(tmp_path / "elsewhere")
    done = interrupt(monkeypatch, after=0)
    run_pack(plan_pack(source, out), resumable=True)
    assert done == []
    assert set(load(out)) == set(NAMES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "m", "out"]


def test_output_is_locked_until_it_is_in_place(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fcntl")
    source, out = model(tmp_path / "m", rng), tmp_path / "out"
    real = publish._put_in_place

    def second_run_first(*args: Any) -> None:
        monkeypatch.setattr(publish, "_put_in_place", real)
        with pytest.raises(CheckpointError, match="another run is writing there"):
            run_pack(plan_pack(source, out, shard_size=20_000), resumable=True)
        real(*args)

    monkeypatch.setattr(publish, "_put_in_place", second_run_first)
    run_pack(plan_pack(source, out), resumable=True)
    assert set(load(out)) == set(NAMES)
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]


def test_lock_of_a_run_that_has_finished_is_no_lock(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    path = tmp_path / "marker"
    with path.open("a+") as finished:
        path.unlink()
        with pytest.raises(CheckpointError, match="another run is writing there"):
            publish._lock(finished, tmp_path)
        path.touch()  # of a third run
        with pytest.raises(CheckpointError, match="another run is writing there"):
            publish._lock(finished, tmp_path)


def test_what_a_killed_run_can_leave_is_no_hindrance(tmp_path: Path, rng: np.random.Generator) -> None:
    source, out = model(tmp_path / "m", rng), tmp_path / "out"
    (tmp_path / ".out.resume.partial").mkdir()  # just made
    run_pack(plan_pack(source, out), resumable=True)
    (tmp_path / ".out.resume.old").mkdir()  # moved aside
    (tmp_path / ".out.resume.old/file").write_text("x")
    run_pack(plan_pack(source, out, force=True, exclude=[NAMES[0]]), resumable=True)
    assert set(load(out)) == {*NAMES[1:]}


def test_folders_called_like_weights_are_copied_again(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = model(tmp_path / "m", rng), tmp_path / "out"
    (source / "notes.safetensors").mkdir()
    (source / "notes.safetensors/read.me").write_text("x")
    with monkeypatch.context() as patched:
        patched.setattr(publish, "_put_in_place", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_pack(plan_pack(source, out), resumable=True)
    run_pack(plan_pack(source, out), resumable=True)
    assert (out / "notes.safetensors/read.me").read_text() == "x"


def test_long_names_do_not_share_an_unfinished_output(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = model(tmp_path / "m", rng)
    for end in "ab":
        with monkeypatch.context() as patched:
            interrupt(patched, after=6, error=KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                run_pack(plan_pack(source, tmp_path / ("\N{EURO SIGN}" * 80 + end)), resumable=True)
    kept = list(tmp_path.glob(".*"))
    assert len(kept) == 2
    assert all(list(folder.glob("*.safetensors")) for folder in kept)


def test_only_folders_are_resumed(tmp_path: Path, rng: np.random.Generator) -> None:
    source = model(tmp_path / "m", rng, files=1) / "model.safetensors"
    with pytest.raises(CheckpointError, match="only a folder can be resumed"):
        run_pack(plan_pack(source, tmp_path / "out.safetensors"), resumable=True)


def test_what_is_not_ours_is_not_taken_for_an_unfinished_output(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    source = model(tmp_path / "m", rng)
    stranger = tmp_path / ".out.resume.partial"
    stranger.mkdir()
    (stranger / "thesis").write_text("x")
    with pytest.raises(CheckpointError, match="is in the way of an output that can be resumed"):
        run_pack(plan_pack(source, tmp_path / "out"), resumable=True)
    assert (stranger / "thesis").read_text() == "x"


# ---- some layers only ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "packed"),
    [
        ({"include": ["*.up_proj"]}, {name for name in NAMES if name.endswith("up_proj")}),
        ({"exclude": ["model.layers.[03].*"]}, {n for n in NAMES if ".1." in n or ".2." in n}),
        ({"include": ["*.up_proj", "*.0.*"], "exclude": ["*.0.q_proj"]}, {n for n in NAMES if "up" in n}),
    ],
)
def test_layers_that_are_left_out_are_written_dense(
    tmp_path: Path, rng: np.random.Generator, patterns: dict[str, list[str]], packed: set[str]
) -> None:
    source = model(tmp_path / "m", rng)
    run_pack(plan_pack(source, tmp_path / "out", **patterns), jobs=2)
    out = load(tmp_path / "out")
    assert set(out) == packed
    layers = open_checkpoint(source).layers
    for name in NAMES:
        weight = dequantize(layers[name].read())
        if name in packed:
            assert np.array_equal(dequantize(out[name]), weight)
        else:
            assert np.array_equal(out.tensors[f"{name}.weight"].T, weight)
    assert np.array_equal(out.tensors["model.norm.weight"], np.arange(128, dtype=np.float16))


def test_groups_of_uneven_activation_order_are_refused_or_left_dense(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    q, scale = random_codes(rng, 96, 64), random_scales(rng, 3, 64)
    zero_point = rng.integers(0, 16, (3, 64), dtype=np.uint8)
    g_idx = rng.permutation(np.repeat([0, 1, 2], [40, 0, 56])).astype(np.int32)
    config = gptq_config(checkpoint_format="gptq_v2")
    layers = {
        "a.up": gptq_layer(q, scale, zero_point, g_idx=g_idx),
        "a.down": gptq_layer(q, scale, zero_point),
    }
    source = write_model(tmp_path / "m", config, layers)
    message = (
        "layer a.up: g_idx puts 40 rows in group 0; the group size is 32, and packed groups are full; leave"
    )
    with pytest.raises(CheckpointError, match=message):
        plan_pack(source, tmp_path / "out")
    run_pack(plan_pack(source, tmp_path / "out", exclude=["a.up"]))
    exact = (q - zero_point[g_idx].astype(np.float64)) * scale[g_idx].astype(np.float64)
    dense = load(tmp_path / "out").tensors["a.up.weight"]
    assert np.array_equal(dense, exact.astype(np.float16).T)
    assert not compare(source, tmp_path / "out").differences


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"include": ["*.k_proj"]}, r"no layer is called like '\*.k_proj'"),
        ({"exclude": ["*.k_proj"]}, r"no layer is called like '\*.k_proj'"),
        ({"exclude": ["*"]}, "the patterns leave no layer"),
    ],
)
def test_patterns_that_choose_nothing_are_refused(
    tmp_path: Path, rng: np.random.Generator, patterns: dict[str, list[str]], message: str
) -> None:
    source = model(tmp_path / "m", rng)
    with pytest.raises(CheckpointError, match=message):
        plan_pack(source, tmp_path / "out", **patterns)


# ---- scales that are not finite --------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::marlin_jit.formats.CheckpointWarning")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_bad_scales_become_zero_only_when_asked_for(
    tmp_path: Path, rng: np.random.Generator, value: float
) -> None:
    scale = random_scales(rng, 4, 64)
    scale[2, 7] = value
    scale[3, 1] = value
    layer = gptq_layer(random_codes(rng, 128, 64), scale, rng.integers(0, 16, (4, 64), dtype=np.uint8))
    source = write_model(tmp_path / "m", gptq_config(checkpoint_format="gptq_v2"), {"a": layer})
    with pytest.raises(
        CheckpointError, match=r"tensor a.scales has 2 NaN or infinite of 256 scales, the first"
    ):
        plan_pack(source, tmp_path / "out")
    plan = plan_pack(source, tmp_path / "out", options=ReadOptions(fix_nan_scales=True))
    (note,) = plan.notes
    assert "a.scales: 2 NaN or infinite of 256 scales are taken as 0, the first at index [2, 7]" in note
    run_pack(plan)
    weight = dequantize(load(tmp_path / "out")["a"]).astype(np.float64)
    assert (weight[64:96, 7] == 0).all() and (weight[96:, 1] == 0).all()
    z = unpack_zero_points(layer["qzeros"])
    q = unpack_codes(layer["qweight"])
    finite = np.where(np.isfinite(scale), scale, 0).astype(np.float64)
    exact = (q - z.repeat(32, axis=0)) * finite.repeat(32, axis=0)
    assert np.array_equal(weight, exact.astype(np.float16))


def unpack_zero_points(words: np.ndarray) -> np.ndarray:
    return (
        (words.view(np.uint32)[:, :, None] >> (4 * np.arange(8, dtype=np.uint32)) & 15)
        .reshape(words.shape[0], -1)
        .astype(np.float64)
    )


def unpack_codes(words: np.ndarray) -> np.ndarray:
    return unpack_zero_points(np.ascontiguousarray(words.T)).T


def test_a_full_disk_is_found_before_the_work(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_pack(model(tmp_path / "m", rng), tmp_path / "out")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=plan.bytes_after - 1))
    done = interrupt(monkeypatch, after=0)
    with pytest.raises(CheckpointError, match=r"out: takes [\d,]+ bytes, but only [\d,]+ are free"):
        run_pack(plan)
    assert not done
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_progress_is_optional(tmp_path: Path, rng: np.random.Generator) -> None:
    run_pack(plan_pack(model(tmp_path / "m", rng), tmp_path / "out"), no_bytes)
    assert set(load(tmp_path / "out")) == set(NAMES)


@pytest.mark.parametrize("target", [targets.PackedTarget(), targets.DenseTarget(None)])
def test_what_is_wrong_with_a_weight_says_where_it_lies(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, target: targets.Target
) -> None:
    source = model(tmp_path / "m", rng, files=1)
    layer = open_checkpoint(source).layers[NAMES[0]]

    def read(self: Any) -> Any:
        raise ValueRangeError("q: 1 of 9 values outside 0..15")

    monkeypatch.setattr(type(layer), "read", read)
    with pytest.raises(CheckpointError) as caught:
        target.arrays(layer, False)
    assert str(caught.value) == f"{source}: layer {NAMES[0]}: q: 1 of 9 values outside 0..15"
