"""`matmul` on NumPy arrays against float64, its errors and switches, and the table with NumPy for kernels."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import marlin_jit as mj
from marlin_jit import _tensor_map, launch, plan, tuned
from marlin_jit.device import DeviceInfo
from marlin_jit.errors import (
    CompileError,
    DeviceError,
    DTypeError,
    LaunchError,
    ShapeError,
    ValueRangeError,
)

engine = import_module("marlin_jit.dispatch")  # the package's attribute of that name is the function

FP16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
HALF_ULP = {FP16: 2.0**-11, BF16: 2.0**-8}
KINDS = ("symmetric", "zero points", "real zeros", "activation order")


pytestmark = pytest.mark.usefixtures("fresh_dispatch")


def plain_weight(
    rng: np.random.Generator,
    kind: str = "zero points",
    K: int = 192,
    N: int = 70,
    dtype: Any = FP16,
    group: int = 64,
) -> mj.QuantWeight:
    groups = 1 if group == -1 else K // group
    q = rng.integers(0, 16, (K, N), dtype=np.uint8)
    scale = (0.005 + 0.01 * rng.random((groups, N))).astype(np.float32).astype(dtype)
    if kind == "symmetric":
        return mj.QuantWeight(q, scale, None, group)
    if kind == "real zeros":
        zero = (-0.1 + 0.05 * rng.standard_normal((groups, N))).astype(np.float32).astype(dtype)
        return mj.QuantWeight(q, scale, zero, group)
    g_idx = None
    if kind == "activation order":
        g_idx = rng.permutation(np.arange(K) // (K // groups)).astype(np.int32)
    return mj.QuantWeight.from_zero_points(q, scale, rng.integers(0, 16, (groups, N)), group, g_idx)


def weight64(qw: mj.QuantWeight) -> np.ndarray:
    """``q*scale + zero`` in float64 [K, N]."""
    size = qw.K if qw.group_size == -1 else qw.group_size
    of = np.arange(qw.K) // size if qw.g_idx is None else qw.g_idx
    scale = qw.scale.astype(np.float64)
    zero = -8 * scale if qw.zero is None else qw.zero.astype(np.float64)
    return qw.q * scale[of] + zero[of]


def activations(rng: np.random.Generator, *shape: int, dtype: Any = FP16) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32).astype(dtype)


def assert_product(y: np.ndarray, x: np.ndarray, w64: np.ndarray, bias: np.ndarray | None = None) -> None:
    """Each output is the exact one rounded once, up to float32's error of the sum."""
    wide = x.astype(np.float64)
    exact = wide @ w64 + (0 if bias is None else bias.astype(np.float64))
    slack = (np.abs(wide) @ np.abs(w64) + np.abs(exact)) * 2.0**-20
    assert y.dtype == x.dtype
    assert y.shape == exact.shape
    error = np.abs(y.astype(np.float64) - exact)
    assert (error <= HALF_ULP[y.dtype] * np.abs(exact) + slack + 2.0**-25).all(), error.max()


# ---- the reference path ---------------------------------------------------------------------------------


@pytest.mark.parametrize("M", [0, 1, 2, 7])
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_against_float64(kind: str, dtype: np.dtype, M: int, rng: np.random.Generator) -> None:
    qw = plain_weight(rng, kind, dtype=dtype)
    x = activations(rng, M, qw.K, dtype=dtype)
    bias = activations(rng, qw.N, dtype=dtype)
    for w in (qw, mj.pack(qw)):
        assert_product(mj.matmul(x, w), x, weight64(qw))
        assert_product(mj.matmul(x, w, bias=bias), x, weight64(qw), bias)
        out = np.full((M, qw.N), np.nan, dtype)
        assert mj.matmul(x, w, bias, out) is out
        assert_product(out, x, weight64(qw), bias)
        assert np.array_equal(x @ w, mj.matmul(x, w))


@pytest.mark.parametrize(
    ("K", "N", "group"), [(17, 3, -1), (96, 1, 48), (1, 1, -1), (96, 5, 1), (576, 65, 192)]
)
def test_shapes_and_groups_that_fit_no_tile(K: int, N: int, group: int, rng: np.random.Generator) -> None:
    qw = plain_weight(rng, K=K, N=N, group=group)
    x = activations(rng, 3, K)
    assert_product(mj.matmul(x, qw), x, weight64(qw))
    if group == -1:
        assert_product(mj.matmul(x, mj.pack(qw)), x, weight64(qw))


@pytest.mark.parametrize("leading", [(), (1,), (2, 3), (2, 0, 3), (1, 2, 2, 2)], ids=str)
def test_leading_dimensions(leading: tuple[int, ...], rng: np.random.Generator) -> None:
    qw = plain_weight(rng)
    w = mj.pack(qw)
    x = activations(rng, *leading, qw.K)
    assert_product(mj.matmul(x, w), x, weight64(qw))
    out = np.empty((*leading, qw.N), FP16)
    assert mj.matmul(x, w, out=out) is out
    assert_product(out, x, weight64(qw))


def test_strides_of_every_kind(rng: np.random.Generator) -> None:
    qw = plain_weight(rng)
    w, w64, K, N = mj.pack(qw), weight64(qw), qw.K, qw.N
    wide = activations(rng, 6, 2 * K + 64)
    for x in (
        wide[:, 64 : 64 + K],
        activations(rng, K, 5).T,
        wide[::-1, :K],
        wide[:, K - 1 :: -1],
        wide[::2, : 2 * K : 2],
        activations(rng, 3, K, 2).transpose(2, 0, 1),
        np.broadcast_to(wide[0, :K], (4, K)),
    ):
        assert_product(mj.matmul(x, w), x, w64)
    x = wide[:, :K]
    for out in (
        np.empty((6, 2 * N), FP16)[:, ::2],
        np.empty((N, 6), FP16).T,
        np.empty((6, N), FP16)[::-1],
    ):
        assert mj.matmul(x, w, out=out) is out
        assert_product(out, x, w64)


def test_a_result_beyond_the_range_is_infinite() -> None:
    """As IEEE arithmetic has it, without a warning (warnings would be errors of the caller's tests)."""
    w = mj.QuantWeight(np.full((64, 2), 15, np.uint8), np.full((1, 2), 100, FP16), None, -1)
    with np.errstate(all="raise"):
        assert np.isposinf(mj.matmul(np.full((1, 64), 100, FP16), w)).all()


# ---- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8, np.int32, np.bool_])
def test_other_dtypes_of_x(dtype: Any, rng: np.random.Generator) -> None:
    w = mj.pack(plain_weight(rng))
    with pytest.raises(DTypeError, match=f"x must be float16 or bfloat16, got {np.dtype(dtype)}"):
        mj.matmul(np.ones((1, w.K), dtype), w)
    with pytest.raises(DTypeError, match=str(np.dtype(dtype))):
        mj.explain(np.ones((1, w.K), dtype), w)


def test_the_other_half_type(rng: np.random.Generator) -> None:
    w = mj.pack(plain_weight(rng))
    x = np.ones((2, w.K), BF16)
    with pytest.raises(DTypeError, match="x is bfloat16 and the weight float16"):
        mj.matmul(x, w)
    y = mj.matmul(x, w.astype(BF16))
    assert y.dtype == BF16


@pytest.mark.parametrize("shape", [(), (191,), (2, 193), (192, 2), (0,)], ids=str)
def test_shapes_of_x_that_do_not_fit(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    for w in (plain_weight(rng), mj.pack(plain_weight(rng))):
        with pytest.raises(ShapeError, match="last dimension must be K = 192"):
            mj.matmul(np.ones(shape, FP16), w)


def test_bias_that_does_not_fit(rng: np.random.Generator) -> None:
    w = mj.pack(plain_weight(rng))
    x = activations(rng, 2, w.K)
    for shape in ((), (1,), (69,), (1, 70), (2, 70)):
        with pytest.raises(ShapeError, match=r"bias must have shape \(70,\)"):
            mj.matmul(x, w, bias=np.ones(shape, FP16))
    with pytest.raises(DTypeError, match="bias must be float16 like x, got float32"):
        mj.matmul(x, w, bias=np.ones(70, np.float32))
    with pytest.raises(DTypeError, match="bias must be a NumPy, CuPy or DLPack array, got list"):
        mj.matmul(x, w, bias=[1.0] * 70)
    assert_product(mj.matmul(x, w, bias=np.ones(140, FP16)[::2]), x, weight64(mj.unpack(w)), np.ones(70))


def test_out_that_does_not_fit(rng: np.random.Generator) -> None:
    w = mj.pack(plain_weight(rng))
    x = activations(rng, 2, w.K)
    for shape in ((70,), (2, 69), (3, 70), (1, 2, 70)):
        with pytest.raises(ShapeError, match=r"out must have shape \(2, 70\)"):
            mj.matmul(x, w, out=np.empty(shape, FP16))
    for dtype in (np.float32, BF16):
        with pytest.raises(DTypeError, match="out must be float16 like x"):
            mj.matmul(x, w, out=np.empty((2, 70), dtype))
    with pytest.raises(DTypeError, match="out must be a NumPy or CuPy array, got list"):
        mj.matmul(x, w, out=[[0.0] * 70] * 2)


def test_out_that_overlaps_an_input(rng: np.random.Generator) -> None:
    w = plain_weight(rng, K=64, N=64, group=32)
    memory = activations(rng, 6, 64)
    for out in (memory[:4], memory[2:], memory[3::-1]):
        with pytest.raises(ValueRangeError, match="out overlaps x"):
            mj.matmul(memory[:4], w, out=out)
    with pytest.raises(ValueRangeError, match="out overlaps bias"):
        mj.matmul(activations(rng, 4, 64), w, bias=memory[1], out=memory[:4])
    x = memory[:3]
    out = memory[3:]
    assert_product(mj.matmul(x, w, out=out), x, weight64(w))


def test_things_that_are_no_arrays(rng: np.random.Generator) -> None:
    w = mj.pack(plain_weight(rng))
    x = activations(rng, 1, w.K)
    for other in ([[1.0] * w.K], 1.0, None, "x"):
        with pytest.raises(DTypeError, match="x must be a NumPy, CuPy or DLPack array, got"):
            mj.matmul(other, w)
    with pytest.raises(DTypeError, match="w must be a MarlinWeight or a QuantWeight, got ndarray"):
        mj.matmul(x, np.ones((w.K, w.N), FP16))


class HostTensor:
    """Stands for another library's array in host memory."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **_: Any) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def test_another_librarys_array_in_host_memory(rng: np.random.Generator) -> None:
    pytest.importorskip("cupy")
    w = mj.pack(plain_weight(rng))
    with pytest.raises(DTypeError, match=r"x \(HostTensor\) is no array on a GPU that CuPy can read"):
        mj.matmul(HostTensor(np.ones((1, w.K), FP16)), w)


def test_arrays_of_two_sides(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnDevice(np.ndarray):
        """Plays an array of a GPU."""

    monkeypatch.setattr(engine, "is_device_array", lambda a: isinstance(a, OnDevice))
    w = plain_weight(rng)
    x = activations(rng, 2, w.K)
    on_device = replace(w, q=w.q.view(OnDevice))
    with pytest.raises(DeviceError, match=r"x is a NumPy array and the weight holds CuPy .*w\.to_host\(\)"):
        mj.matmul(x, on_device)
    with pytest.raises(DeviceError, match=r"x is a CuPy array and the weight holds NumPy .*w\.to_device\(\)"):
        mj.matmul(x.view(OnDevice), w)
    with pytest.raises(DeviceError, match="x and bias must both be NumPy or both GPU arrays"):
        mj.matmul(x, w, bias=np.ones(w.N, FP16).view(OnDevice))
    with pytest.raises(DeviceError, match="x and out must both be NumPy or both GPU arrays"):
        mj.matmul(x, w, out=np.ones((2, w.N), FP16).view(OnDevice))


PATHS = ["reference", "batch_invariant", "fp16_cache", "dense"]
PATHS += ["marlin", "marlin_pair", "cross_iteration", "native"]


def test_paths_by_name(rng: np.random.Generator) -> None:
    w = mj.pack(plain_weight(rng))
    x = activations(rng, 2, w.K)
    with pytest.raises(
        ValueRangeError, match="no path 'tensor_core'; there are: reference, batch_invariant, fp16_cache, den"
    ):
        mj.matmul(x, w, path="tensor_core")
    for path in PATHS[1:]:
        with pytest.raises(LaunchError, match=f"path '{path}' cannot be taken here: .*x is a GPU array"):
            mj.matmul(x, w, path=path)
    assert_product(mj.matmul(x, w, path="reference"), x, weight64(mj.unpack(w)))


# ---- explain, stats, log --------------------------------------------------------------------------------


def test_explain_shows_every_gate(rng: np.random.Generator) -> None:
    w = mj.pack(plain_weight(rng))
    answer = mj.explain(activations(rng, 2, w.K), w)
    assert answer.path == "reference"
    assert answer.plan is None
    assert [a.path for a in answer.answers] == PATHS
    assert [a.chosen for a in answer.answers] == [True, *[False] * 7]
    lines = str(answer).splitlines()
    assert lines[:2] == ["-> reference", "     [x] x is a NumPy array"]
    at = lines.index("   marlin")
    assert lines[at + 1 : at + 4] == [
        "     [ ] x is a GPU array",
        "     [x] dispatch is enabled",
        "     [x] the weight is packed",
    ]
    assert lines[-2:] == ["   native", "     [ ] x is a GPU array"]
    assert mj.stats() == {}


def test_stats_count_products(rng: np.random.Generator) -> None:
    w = plain_weight(rng)
    x = activations(rng, 2, w.K)
    for _ in range(3):
        mj.matmul(x, w)
    with pytest.raises(ShapeError):
        mj.matmul(x[:, 1:], w)
    counted = mj.stats()
    assert counted == {"reference": 3}
    counted["reference"] = 99  # a copy
    assert mj.stats() == {"reference": 3}
    mj.matmul(x[0], w)
    by_shape = {("reference", 2, w.N, w.K, 64): 3, ("reference", 1, w.N, w.K, 64): 1}
    assert mj.stats_by_shape() == by_shape
    assert {taken.M for taken in mj.stats_by_shape()} == {1, 2}
    mj.reset_stats()
    assert mj.stats() == {} == mj.stats_by_shape()


def test_first_dispatch_is_logged_once(rng: np.random.Generator, caplog: pytest.LogCaptureFixture) -> None:
    w = plain_weight(rng)
    with caplog.at_level(logging.INFO, logger="marlin_jit"):
        for M in (2, 3):
            mj.matmul(activations(rng, M, w.K), w)
    assert [r.getMessage() for r in caplog.records] == ["first dispatch: reference, M=2 N=70 K=192 group=64"]
    assert caplog.records[0].levelno == logging.INFO


# ---- switches -------------------------------------------------------------------------------------------


def test_on_by_default() -> None:
    assert mj.dispatch_enabled()


@pytest.mark.parametrize(("value", "enabled"), [("0", False), ("1", True)])
def test_environment_variable(value: str, enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARLIN_JIT_USE_MARLIN", value)
    assert mj.dispatch_enabled() is enabled


@pytest.mark.parametrize("value", ["", "yes", "2", " 1"])
def test_environment_variable_with_another_value(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARLIN_JIT_USE_MARLIN", value)
    with pytest.raises(ValueRangeError, match=f"MARLIN_JIT_USE_MARLIN must be 0 or 1, got {value!r}"):
        mj.dispatch_enabled()
    with mj.dispatch(True):
        assert mj.dispatch_enabled()


def test_later_switches_win_over_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARLIN_JIT_USE_MARLIN", "0")
    mj.set_dispatch(True)
    assert mj.dispatch_enabled()
    with mj.dispatch(False):
        assert not mj.dispatch_enabled()
        with mj.dispatch(True):
            assert mj.dispatch_enabled()
            mj.set_dispatch(False)
            assert mj.dispatch_enabled()
        assert not mj.dispatch_enabled()
        mj.set_dispatch(True)
        assert not mj.dispatch_enabled()
    assert mj.dispatch_enabled()


def test_an_exception_leaves_the_block_as_it_was() -> None:
    with pytest.raises(KeyError), mj.dispatch(False):
        raise KeyError
    assert mj.dispatch_enabled()


def test_a_block_is_of_its_thread_alone() -> None:
    inside, checked = threading.Event(), threading.Event()
    seen: dict[str, bool] = {}

    def off() -> None:
        with mj.dispatch(False):
            inside.set()
            checked.wait(10)
            seen["off"] = mj.dispatch_enabled()

    thread = threading.Thread(target=off)
    thread.start()
    assert inside.wait(10)
    seen["main"] = mj.dispatch_enabled()
    checked.set()
    thread.join()
    assert seen == {"off": False, "main": True}


# ---- the table, with kernels played by NumPy ------------------------------------------------------------


def rows_of(matrix: launch.Matrix) -> np.ndarray:
    """A `Matrix` of host memory as an array."""
    memory = (ctypes.c_uint16 * ((matrix.rows - 1) * matrix.stride + matrix.columns)).from_address(
        matrix.pointer
    )
    flat = np.frombuffer(memory, np.uint16).view(FP16)
    return np.lib.stride_tricks.as_strided(flat, (matrix.rows, matrix.columns), (2 * matrix.stride, 2))


def swiglu64(y: np.ndarray) -> np.ndarray:
    """SwiGLU of eight columns of gate and eight of up in turn."""
    blocks = y.reshape(len(y), -1, 16)
    gate, up = blocks[..., :8].reshape(len(y), -1), blocks[..., 8:].reshape(len(y), -1)
    return gate / (1 + np.exp(-gate)) * up


class PlayedGpu:
    """Launchers that note their calls, raise what they are told to, and else multiply with NumPy."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.plans: list[plan.Plan] = []
        self.failing: dict[str, Exception] = {}
        self.capturing = False
        self.capability = (9, 0)
        self.turn = threading.RLock()

    def _note(self, name: str) -> None:
        # Launches that share scratch memory are one turn, which no other thread of the stream interrupts.
        assert self.turn._is_owned()  # type: ignore[attr-defined]
        self.calls.append(name)
        if name in self.failing:
            raise self.failing[name]

    def _product(self, x: launch.Matrix, w64: np.ndarray, bias: Any, out: launch.Matrix) -> None:
        y = rows_of(x).astype(np.float64) @ w64
        rows_of(out)[...] = y if bias is None else y + bias.astype(np.float64)

    def marlin(
        self, p: plan.Plan, x: launch.Matrix, w: Any, bias: Any, out: launch.Matrix, *, gated: bool = False
    ) -> None:
        zeros = p.build.defines["ZEROS"]
        self.plans.append(p)
        self._note(("fused" if zeros else "symmetric") + (" gated" if gated else ""))
        assert (None, w.delta16, w.points16)[zeros] is not None or zeros == 0
        plain = mj.unpack(w)
        w64 = weight64(plain if zeros else replace(plain, zero=None))
        if gated:
            rows_of(out)[...] = swiglu64(rows_of(x).astype(np.float64) @ w64)[:, : out.columns]
        else:
            self._product(x, w64, bias, out)

    def swiglu(self, y: launch.Matrix, out: launch.Matrix, *, bfloat16: bool) -> None:
        self._note("swiglu")
        assert not bfloat16
        rows_of(out)[...] = swiglu64(rows_of(y).astype(np.float64))[:, : out.columns]

    def scratch_array(self, purpose: str, shape: tuple[int, int], dtype: Any) -> np.ndarray:
        self.product = np.full((shape[0], shape[1] + 8), np.nan, dtype)
        return self.product[:, : shape[1]]

    def group_sums(self, x: launch.Matrix, w: Any) -> np.ndarray:
        self._note("group_sums")
        return rows_of(x).astype(np.float64).reshape(x.rows, w.groups, -1).sum(axis=2)

    def correct(self, sums: np.ndarray, w: Any, out: launch.Matrix) -> None:
        self._note("correct")
        plain = mj.unpack(w)
        delta = plain.zero.astype(np.float64) + 8 * plain.scale.astype(np.float64)
        rows_of(out)[...] = rows_of(out) + sums @ delta

    def dense_weights(self, w: Any, first: int, out: np.ndarray) -> None:
        self._note("dense")
        assert first % 64 == out.shape[0] % 64 == 0 and first + out.shape[0] <= w.padded_shape[1]
        assert out.shape[1] == w.padded_shape[0]
        out[...] = np.nan  # rows and columns of padding must not matter
        there = mj.dequantize(w)[:, first : first + out.shape[0]].T
        out[: there.shape[0], : there.shape[1]] = there

    def matmul_dense(
        self, x: launch.Matrix, w: np.ndarray, out: launch.Matrix, *, transposed: bool = False
    ) -> None:
        self._note("cublas")
        if transposed:
            w = w[: out.columns, : x.columns].T
        assert all(m.rows == 1 or m.stride >= m.columns for m in (x, out)), "no stride that cuBLAS takes"
        self._product(x, w.astype(np.float64), None, out)

    def copied(self, purpose: str, array: np.ndarray, columns: int) -> launch.Matrix:
        self._note("copy")
        self.kept = np.ascontiguousarray(array).reshape(-1, columns)
        return launch.Matrix(self.kept.ctypes.data, columns, *self.kept.shape)

    def native(self, x: launch.Matrix, w: Any, bias: Any, out: launch.Matrix, iteration: Any = None) -> None:
        self._note("native" if iteration is None else f"iteration {iteration.index}, seed {iteration.seed}")
        if iteration is not None:
            w = mj.rounded(w, iteration.index, iteration.seed)
        self._product(x, weight64(mj.unpack(w) if isinstance(w, mj.MarlinWeight) else w), bias, out)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedGpu]:
    """NumPy arrays pass for arrays of an H200."""
    played = PlayedGpu()
    monkeypatch.setattr(_tensor_map, "available", lambda: True)
    checked: Callable[..., Any] = engine._checked
    as_rows = engine._as_rows

    def checked_on_device(*arguments: Any, **named: Any) -> Any:
        call = checked(*arguments, **named)
        call.device = DeviceInfo(0, "played", played.capability, 132, 232448, 233472, 50 << 20)
        return call

    def as_rows_of_host(array: np.ndarray, columns: int) -> launch.Matrix | None:
        data = SimpleNamespace(ptr=array.ctypes.data)
        shim = SimpleNamespace(dtype=array.dtype, shape=array.shape, strides=array.strides, data=data)
        return as_rows(shim, columns)

    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 0)), empty=np.empty)
    monkeypatch.setattr(engine, "_checked", checked_on_device)
    monkeypatch.setattr(engine, "_as_rows", as_rows_of_host)
    monkeypatch.setattr(engine, "import_cupy", lambda: cupy)
    monkeypatch.setattr(engine, "is_capturing", lambda _: played.capturing)
    monkeypatch.setattr(engine, "_cublas_there", lambda: True)
    monkeypatch.setattr(engine, "scratch", SimpleNamespace(turn=lambda: played.turn))
    monkeypatch.setattr(engine, "_copied", played.copied)
    monkeypatch.setattr(engine.repeat, "remember", lambda *_: None)  # tests/gpu/test_repeat_gpu.py
    monkeypatch.setattr(engine, "_scratch_array", played.scratch_array)
    monkeypatch.setattr("marlin_jit._cublas.matmul_dense", played.matmul_dense)
    for name in ("marlin", "group_sums", "correct", "native", "swiglu", "dense_weights"):
        monkeypatch.setattr(launch, name, getattr(played, name))
    yield played


@pytest.fixture
def packed(rng: np.random.Generator) -> mj.MarlinWeight:
    return mj.pack(plain_weight(rng, K=256, N=128, group=64))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def check(x: np.ndarray, w: Any, y: np.ndarray) -> None:
    np.testing.assert_allclose(
        y.astype(np.float64), x.astype(np.float64) @ weight64(mj.unpack(w)), rtol=2e-3, atol=2e-3
    )


def test_which_path_is_taken(gpu: PlayedGpu, packed: Any, rng: np.random.Generator) -> None:
    x = activations(rng, 3, 256)
    plain = mj.unpack(packed)
    assert mj.explain(x, packed).path == "marlin"
    assert mj.explain(x, plain).path == "native"
    assert mj.explain(x, mj.pack(replace(plain, zero=None))).path == "marlin"
    with mj.dispatch(False):
        assert mj.explain(x, packed).path == "native"
    gpu.capability = (7, 5)
    assert mj.explain(x, packed).path == "native"
    assert "[ ] the device has compute capability 8.0 or more" in str(mj.explain(x, packed))
    gpu.capability = (12, 0)
    assert mj.explain(x, packed).path == "marlin"
    packed.cache_fp16()
    assert mj.explain(x, packed).path == "fp16_cache"
    packed.drop_fp16()
    assert mj.explain(x, packed).path == "marlin"


@pytest.mark.parametrize(
    ("kind", "zeros"),
    [
        ("symmetric", plan.Zeros.NONE),
        ("zero points", plan.Zeros.POINTS),
        ("activation order", plan.Zeros.POINTS),
        ("real zeros", plan.Zeros.DELTAS),
    ],
)
def test_the_planner_is_told_what_zeros_a_weight_has(
    gpu: PlayedGpu, rng: np.random.Generator, kind: str, zeros: plan.Zeros
) -> None:
    w = mj.pack(plain_weight(rng, kind))
    for rows in (3, 40):
        answer = mj.explain(activations(rng, rows, 192), w)
        problem = plan.Problem(rows, 192, 128, 64, zeros, False)
        assert answer.plan == plan.choose(problem, plan.Limits(132, 232448, 233472, 9))


def test_explain_tells_a_tuned_plan_from_the_planners_own(
    gpu: PlayedGpu, packed: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def second_best(problem: plan.Problem, limits: plan.Limits, name: str) -> plan.Plan:
        return plan.plans(problem, limits)[1]

    with monkeypatch.context() as patched:
        patched.setattr(tuned, "plan_for", second_best)
        answer = mj.explain(activations(rng, 40, 256), packed)
    assert answer.tuned and str(answer).endswith(f"{answer.plan.threads} threads, tuned")
    assert not mj.explain(activations(rng, 40, 256), packed).tuned


def test_explain_shows_the_plan(gpu: PlayedGpu, packed: Any, rng: np.random.Generator) -> None:
    answer = mj.explain(activations(rng, 40, 256), packed)
    limits = plan.Limits(132, 232448, 233472, 9)
    expected = plan.choose(plan.Problem(40, 256, 128, 64, plan.Zeros.POINTS, False), limits)
    assert answer.plan == expected
    last = str(answer).splitlines()[-1]
    assert f"{expected.build.name} (BF16=0, GROUP=64, ZEROS=" in last
    assert last.endswith(f"grid {expected.grid}, {expected.threads} threads") and not answer.tuned
    assert mj.explain(np.empty((0, 256), FP16), packed).plan is None


def test_no_rows_launch_nothing(gpu: PlayedGpu, packed: Any) -> None:
    empty = np.empty((2, 0, 256), FP16)
    assert mj.matmul(empty, packed).shape == (2, 0, 128)
    with pytest.raises(ValueRangeError, match="no path 'tensor_core'"):
        mj.matmul(empty, packed, path="tensor_core")
    assert gpu.calls == []


def test_each_path_multiplies(gpu: PlayedGpu, packed: Any, rng: np.random.Generator) -> None:
    x = activations(rng, 3, 256)
    for path, calls in (
        ("marlin", ["fused"]),
        ("marlin_pair", ["symmetric", "group_sums", "correct"]),
        ("native", ["native"]),
    ):
        gpu.calls.clear()
        check(x, packed, mj.matmul(x, packed, path=path))
        assert gpu.calls == calls
    assert mj.stats() == {"marlin": 1, "marlin_pair": 1, "native": 1}


@pytest.mark.parametrize(
    ("path", "calls"),
    [
        (None, ["fused gated"]),
        ("marlin", ["fused gated"]),
        ("marlin_pair", ["symmetric", "group_sums", "correct", "swiglu"]),
        ("native", ["native", "swiglu"]),
        ("fp16_cache", ["cublas", "swiglu"]),
        ("dense", ["dense", "cublas", "swiglu"]),
    ],
)
def test_swiglu_on_each_path(gpu: PlayedGpu, path: str | None, calls: list[str], rng: Any) -> None:
    gate, up = (plain_weight(rng, K=256, N=100) for _ in range(2))
    w = mj.pack_gate_up(gate, up)
    if path == "fp16_cache":
        w.packed.cache_fp16()
    x = activations(rng, 3, 256)
    wide = x.astype(np.float64)
    g, u = wide @ weight64(gate), wide @ weight64(up)
    y = mj.matmul_swiglu(x, w, path=path)
    assert gpu.calls == calls
    assert y.shape == (3, 100)
    np.testing.assert_allclose(y.astype(np.float64), g / (1 + np.exp(-g)) * u, rtol=3e-3, atol=2e-3)
    assert mj.stats_by_shape() == {(path or "marlin", 3, 208, 256, 64): 1}


def test_batch_invariant_products_take_k_in_the_same_shares(gpu: PlayedGpu, packed: Any, rng: Any) -> None:
    """Up to 16 rows at a time, group size 64; what a row's sums are made of is the same for all."""
    x = activations(rng, 50, 256)
    bias = activations(rng, 128)
    for rows, launches in ((1, 1), (8, 1), (9, 1), (16, 1), (17, 2), (50, 4)):
        gpu.calls.clear()
        y = mj.matmul(x[:rows], packed, bias, path="batch_invariant")
        np.testing.assert_allclose(
            y.astype(np.float64),
            x[:rows].astype(np.float64) @ weight64(mj.unpack(packed)) + bias.astype(np.float64),
            rtol=2e-3,
            atol=4e-3,
        )
        assert gpu.calls == ["fused"] * launches
    shares = {(p.build.name, p.grid[1], p.threads // p.chunks, p.build.defines["ZEROS"]) for p in gpu.plans}
    assert len(shares) == 1
    assert {p.build.defines["M_BLOCKS"] for p in gpu.plans} == {1, 2}


@pytest.fixture
def batch_invariant() -> Iterator[None]:
    mj.set_batch_invariant(True)
    yield
    mj.set_batch_invariant(False)


def test_batch_invariance_for_the_process(
    gpu: PlayedGpu, batch_invariant: None, packed: Any, rng: np.random.Generator
) -> None:
    """What is not batch-invariant is not taken: neither a plan for these rows alone, nor cuBLAS."""
    x = activations(rng, 3, 256)
    packed.cache_fp16()
    assert mj.explain(x, packed).path == "batch_invariant"
    check(x, packed, mj.matmul(x, packed))
    check(x, packed, mj.matmul(x, mj.unpack(packed)))
    with mj.dispatch(False):
        check(x, packed, mj.matmul(x, packed))
    assert gpu.calls == ["fused", "native", "native"]
    w = mj.pack_gate_up(*(plain_weight(rng, K=256, N=64) for _ in range(2)))
    mj.matmul_swiglu(x, w)
    assert gpu.calls[3:] == ["fused gated"]
    gpu.failing["fused"] = LaunchError("no such kernel")
    with pytest.raises(LaunchError, match="no such kernel"):  # rather than another path's bits
        mj.matmul(x, packed)
    mj.set_batch_invariant(False)
    assert mj.explain(x, packed).path == "fp16_cache"


def test_dense_weights_a_number_of_columns_at_a_time(
    gpu: PlayedGpu, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = mj.pack(plain_weight(rng, K=250, N=300, group=125 * 2))
    x, bias = activations(rng, 5, 250), activations(rng, 300)
    for limit, tiles in ((64 << 20, 1), (2 * 256 * 128, 3), (2 * 256 * 64, 5), (1, 5)):
        monkeypatch.setattr(launch, "_DENSE_BYTES", limit)
        gpu.calls.clear()
        check(x, w, mj.matmul(x, w, path="dense"))
        assert [call for call in gpu.calls if call != "copy"] == ["dense", "cublas"] * tiles
        y = mj.matmul(x, w, bias, path="dense").astype(np.float64)
        np.testing.assert_allclose(y, mj.matmul(x, w, bias, path="native").astype(np.float64), atol=0.02)


def test_many_rows_are_dense_on_compute_capability_10_alone(
    gpu: PlayedGpu, packed: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "DENSE_MIN_M", 20)
    few, many = activations(rng, 19, 256), activations(rng, 20, 256)
    for capability in ((8, 0), (9, 0), (10, 0), (10, 3), (12, 0)):
        gpu.capability = capability
        assert mj.explain(few, packed).path == "marlin"
        assert mj.explain(many, packed).path == ("dense" if capability[0] == 10 else "marlin")
    gpu.capability = (10, 0)
    check(many, packed, mj.matmul(many, packed))
    assert mj.explain(many, mj.unpack(packed)).path == "native"
    with mj.dispatch(False):
        assert mj.explain(many, packed).path == "native"
    monkeypatch.setattr(engine, "_cublas_there", lambda: False)
    assert mj.explain(many, packed).path == "marlin"


def test_batch_invariance_is_switched_by_a_bool() -> None:
    with pytest.raises(DTypeError, match="batch invariance is switched by True or False, got 1"):
        mj.set_batch_invariant(1)  # type: ignore[arg-type]


def test_swiglu_without_dispatch_or_after_a_refusal(gpu: PlayedGpu, rng: np.random.Generator) -> None:
    w = mj.pack_gate_up(*(plain_weight(rng, K=256, N=64) for _ in range(2)))
    x = activations(rng, 3, 256)
    with mj.dispatch(False):
        expected = mj.matmul_swiglu(x, w)
    gpu.failing["fused gated"] = LaunchError("no such kernel")
    np.testing.assert_array_equal(mj.matmul_swiglu(x, w), expected)
    assert mj.stats() == {"native": 2}


@pytest.mark.parametrize("channel", ["frac4", "sign_bit"])
def test_cross_iteration_rounding(
    channel: str, gpu: PlayedGpu, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = mj.quantize(rng.standard_normal((256, 128)).astype(np.float32), 64, rounding=channel)
    x, bias = activations(rng, 3, 256), activations(rng, 128)
    plain = mj.matmul(x, w.without_rounding(), bias)
    assert mj.explain(x, w).path == "native"
    assert np.array_equal(mj.matmul(x, w, bias), plain)
    with pytest.raises(LaunchError, match="not so that cross-iteration rounding is on"):
        mj.matmul(x, w, path="cross_iteration")
    with mj.iteration(5, seed=2):
        answer = mj.explain(x, w)
        assert answer.path == "cross_iteration"
        at = str(answer).splitlines().index("-> cross_iteration")
        assert str(answer).splitlines()[at + 1 : at + 4] == [
            "     [x] x is a GPU array",
            "     [x] the weight carries a rounding channel",
            "     [x] cross-iteration rounding is on",
        ]
        gpu.calls.clear()
        y = mj.matmul(x, w, bias)
        assert np.array_equal(mj.matmul(x, w, bias, path="cross_iteration"), y)
        assert np.array_equal(mj.matmul(x, w, bias, path="native"), plain), "native is the codes as they are"
        with mj.dispatch(False):
            assert mj.explain(x, w).path == "cross_iteration"
        assert gpu.calls == ["iteration 5, seed 2"] * 2 + ["native"]
        assert mj.explain(x, w.without_rounding()).path == "native"
        with pytest.raises(LaunchError, match="not so that the weight carries a rounding channel"):
            mj.matmul(x, w.without_rounding(), path="cross_iteration")
        assert mj.explain(x, mj.pack(w.without_rounding())).path == "marlin"
        monkeypatch.setenv("MARLIN_JIT_CROSS_ITER_ROUND", "0")
        assert mj.explain(x, w).path == "native"
    assert (y != plain).any()
    assert np.array_equal(y, mj.matmul(x, mj.rounded(w, 5, 2), bias))
    monkeypatch.setenv("MARLIN_JIT_CROSS_ITER_ROUND", "1")
    assert np.array_equal(mj.matmul(x, w, bias), mj.matmul(x, mj.rounded(w, 0, 0), bias))
    assert mj.stats() == {"native": 5, "cross_iteration": 3}


def test_refused_cross_iteration_rounding_is_not_left_for_other_codes(
    gpu: PlayedGpu, rng: np.random.Generator
) -> None:
    w = mj.quantize(rng.standard_normal((256, 128)).astype(np.float32), 64, rounding="frac4")
    gpu.failing["iteration 1, seed 0"] = CompileError("no such instruction")
    with mj.iteration(1), pytest.raises(CompileError, match="no such instruction"):
        mj.matmul(activations(rng, 3, 256), w)
    assert gpu.calls == ["iteration 1, seed 0"]


@pytest.mark.parametrize("error", [LaunchError("too many registers"), CompileError("no such instruction")])
def test_a_refused_path_falls_to_the_next(
    gpu: PlayedGpu,
    packed: Any,
    rng: np.random.Generator,
    error: Exception,
    caplog: pytest.LogCaptureFixture,
) -> None:
    x = activations(rng, 3, 256)
    gpu.failing["fused"] = error
    check(x, packed, mj.matmul(x, packed))
    assert gpu.calls == ["fused", "native"]
    assert mj.stats() == {"native": 1}
    assert warnings_of(caplog) == [f"path marlin is refused, the next one is taken from now on: {error}"]
    answer = mj.explain(x, packed)
    assert answer.path == "native"
    assert "[ ] its kernel was not refused before" in str(answer)

    for _ in range(3):
        check(x, packed, mj.matmul(x, packed))
    assert gpu.calls == ["fused"] + ["native"] * 4  # not tried again
    assert len(warnings_of(caplog)) == 1
    with pytest.raises(LaunchError, match=r"path 'marlin' cannot be taken here: .* was not refused before"):
        mj.matmul(x, packed, path="marlin")
    check(x, packed, mj.matmul(x, packed, path="marlin_pair"))


def test_a_refusal_concerns_one_build(gpu: PlayedGpu, packed: Any, rng: np.random.Generator) -> None:
    gpu.failing["fused"] = LaunchError("refused")
    mj.matmul(activations(rng, 3, 256), packed)
    del gpu.failing["fused"]
    assert mj.explain(activations(rng, 3, 256), packed).path == "native"
    limits = plan.Limits(132, 232448, 233472, 9)
    builds = {
        m: plan.choose(plan.Problem(m, 256, 128, 64, plan.Zeros.POINTS, False), limits).build
        for m in (3, 64, 4000)
    }
    others = [m for m, build in builds.items() if build != builds[3]]
    assert others
    for m in others:
        assert mj.explain(np.empty((m, 256), FP16), packed).path == "marlin"


def test_nothing_is_left(gpu: PlayedGpu, packed: Any, rng: np.random.Generator) -> None:
    x = activations(rng, 3, 256)
    gpu.failing |= {n: LaunchError(n) for n in ("fused", "native")}
    with pytest.raises(LaunchError, match="native"):
        mj.matmul(x, packed)
    assert mj.stats() == {}


@pytest.mark.parametrize("error", ["ILLEGAL_ADDRESS", "MISALIGNED_ADDRESS", "LAUNCH_FAILED"])
def test_a_broken_context_is_no_refusal(
    error: str, gpu: PlayedGpu, packed: Any, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    """An earlier kernel's fault is reported by whatever launch comes next."""
    gpu.failing["fused"] = LaunchError(f"marlin_gemm was refused: CUDA_ERROR_{error}: ...")
    with pytest.raises(LaunchError, match=error):
        mj.matmul(activations(rng, 3, 256), packed)
    assert gpu.calls == ["fused"]
    assert warnings_of(caplog) == []
    assert mj.explain(activations(rng, 3, 256), packed).path == "marlin"


def test_other_errors_change_no_path(gpu: PlayedGpu, packed: Any, rng: np.random.Generator) -> None:
    gpu.failing["fused"] = MemoryError("out of memory")
    with pytest.raises(MemoryError):
        mj.matmul(activations(rng, 3, 256), packed)
    assert mj.explain(activations(rng, 3, 256), packed).path == "marlin"


def test_a_refusal_within_a_capture_is_raised(gpu: PlayedGpu, packed: Any, rng: np.random.Generator) -> None:
    gpu.failing["fused"] = LaunchError("would have to grow")
    gpu.capturing = True
    with pytest.raises(LaunchError, match="would have to grow"):
        mj.matmul(activations(rng, 3, 256), packed)
    assert gpu.calls == ["fused"]
    assert mj.explain(activations(rng, 3, 256), packed).path == "marlin"


def test_an_insisted_path_never_falls(gpu: PlayedGpu, packed: Any, rng: np.random.Generator) -> None:
    gpu.failing["fused"] = LaunchError("refused")
    x = activations(rng, 3, 256)
    with pytest.raises(LaunchError, match="refused"):
        mj.matmul(x, packed, path="marlin")
    assert gpu.calls == ["fused"]
    symmetric = mj.pack(replace(mj.unpack(packed), zero=None))
    for w, path, gate in (
        (packed, "fp16_cache", "the weight carries an FP16 cache"),
        (mj.unpack(packed), "marlin", "the weight is packed"),
        (symmetric, "marlin_pair", "the weight is asymmetric"),
    ):
        with pytest.raises(
            LaunchError, match=f"path '{path}' cannot be taken here: it is not so that {gate}"
        ):
            mj.matmul(x, w, path=path)


def test_explain_without_rows_after_a_refusal(gpu: PlayedGpu, packed: Any, rng: np.random.Generator) -> None:
    gpu.failing["fused"] = LaunchError("refused")
    mj.matmul(activations(rng, 3, 256), packed)
    assert mj.explain(np.empty((0, 256), FP16), packed).path == "marlin"


def test_an_out_of_columns_is_filled(gpu: PlayedGpu, packed: Any, rng: np.random.Generator) -> None:
    x = activations(rng, 3, 256)
    for out in (
        np.empty((3, 256), FP16)[:, ::2],
        np.empty((128, 3), FP16).T,
        np.empty((3, 300), FP16)[:, 7:135],
    ):
        out[...] = np.nan
        assert mj.matmul(x, packed, out=out) is out
        check(x, packed, out)


def test_the_fp16_cache_takes_any_strides(gpu: PlayedGpu, packed: Any, rng: np.random.Generator) -> None:
    """cuBLAS knows no negative strides and none below the row's length: such rows are copied."""
    packed.cache_fp16()
    wide = activations(rng, 5, 600)
    bias = activations(rng, 128)
    for x, copies in (
        (wide[:, 100:356], 0),
        (wide[::-1, :256], 1),
        (np.broadcast_to(wide[0, :256], (5, 256)), 1),
        (np.lib.stride_tricks.sliding_window_view(wide[0], 256)[:5], 1),
        (wide[:, 512::-2], 1),
        (wide[0, :256], 0),
    ):
        x = x[..., :256]
        gpu.calls.clear()
        check(x, packed, mj.matmul(x, packed))
        assert gpu.calls == ["copy"] * copies + ["cublas"]
    x = wide[:, :256]
    for out in (
        np.empty((5, 128), FP16)[::-1],
        np.empty((5, 300), FP16)[:, 5:133],
        np.empty((128, 5), FP16).T,
    ):
        assert mj.matmul(x, packed, bias=bias, out=out) is out
        check(x, packed, out - bias)


# ---- rows without a copy --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (lambda a: a[0, 0], (1, 0)),
        (lambda a: a[0], (3, 40)),
        (lambda a: a, (6, 40)),
        (lambda a: a[:, :, 8:24], (6, 40)),
        (lambda a: a[:, 1:2], (2, 120)),
        (lambda a: a[0, ::-1], (3, -40)),
        (lambda a: a[::-1, ::-1], (6, -40)),
        (lambda a: a[0, ::2], (2, 80)),
        (lambda a: a[..., :1], (6, 40)),
        (lambda a: a[..., :2:2], (6, 40)),
        (lambda a: a[:, :2], None),
        (lambda a: a[:, ::-1], None),
        (lambda a: a[..., ::2], None),
        (lambda a: a[..., ::-1], None),
        (lambda a: a.transpose(1, 0, 2), None),
        (lambda a: a[0].T, None),
        (lambda a: a.view(np.uint8)[..., 1:-1].view(FP16)[..., :8], (6, 40)),
    ],
)
def test_which_strides_need_no_copy(
    view: Callable[[np.ndarray], np.ndarray], expected: tuple[int, int] | None, gpu: PlayedGpu
) -> None:
    array = view(np.zeros((2, 3, 40), FP16))
    found = engine._as_rows(array, array.shape[-1])
    if expected is None:
        assert found is None
    else:
        assert (found.rows, found.stride) == expected
        assert (found.pointer, found.columns) == (array.ctypes.data, array.shape[-1])


@pytest.mark.parametrize("enabled", ["0", 1, None])
def test_switches_take_only_true_and_false(enabled: Any) -> None:
    with pytest.raises(DTypeError, match="True or False"):
        mj.set_dispatch(enabled)
    with pytest.raises(DTypeError, match="True or False"), mj.dispatch(enabled):
        pass


def test_a_read_only_output_and_a_masked_input_are_refused() -> None:
    w = mj.pack(mj.quantize(np.ones((64, 64), np.float16), 64))
    x = np.ones((2, 64), np.float16)
    out = np.empty((2, 64), np.float16)
    out.flags.writeable = False
    with pytest.raises(mj.ValueRangeError, match="read-only"):
        mj.matmul(x, w, out=out)
    with pytest.raises(DTypeError, match="masked"):
        mj.matmul(np.ma.masked_array(x), w)


def test_a_correction_of_more_rows_than_a_grid_holds_is_launched_in_parts(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    launches: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        launch, "_kernel", lambda build: lambda grid, block, args: launches.append((grid, args))
    )
    monkeypatch.setattr(launch, "current_device", lambda: SimpleNamespace(sm_count=132))
    w = mj.pack(plain_weight(rng, K=192, N=70, group=64))  # 3 groups, in rows of 8 cells
    monkeypatch.setattr(launch, "_address", lambda array: id(array))
    sums = SimpleNamespace(data=SimpleNamespace(ptr=1 << 40))
    limit = 65535 * 64
    launch.correct(sums, w, launch.Matrix(1 << 20, 72, 2 * limit + 1, 70))
    assert [grid for grid, _ in launches] == [(2, 65535, 1), (2, 65535, 1), (2, 1, 1)]
    assert [args[0] - (1 << 40) for _, args in launches] == [0, 4 * 8 * limit, 2 * 4 * 8 * limit]
    assert [args[2] - (1 << 20) for _, args in launches] == [0, 2 * 72 * limit, 2 * 2 * 72 * limit]
    assert [int(args[4]) for _, args in launches] == [limit, limit, 1]
