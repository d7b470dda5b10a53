"""`matmul` on a device: strides, tails, streams, graphs, other libraries' arrays, refusals and counts."""

from __future__ import annotations

import gc
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from exact import product, random_rows, random_weight, relative_error, weight64
from helpers import assert_same_bits

import marlin_jit as mj
from marlin_jit import device, launch
from marlin_jit.errors import DeviceError, DTypeError, LaunchError, ShapeError, ValueRangeError

cp = pytest.importorskip("cupy")
engine = import_module("marlin_jit.dispatch")  # the package's attribute of that name is the function

FP16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
BOUND = {FP16: 8e-4, BF16: 6e-3}
"""Twice the usual: this is about places, not rounding (`test_gemm` is), and some outputs are few."""
FEW = {FP16: 1.5e-3, BF16: 1.2e-2}
"""For a handful of outputs, which have no average error."""
PATHS = ("marlin", "marlin_pair", "native")
K, N = 256, 192


pytestmark = pytest.mark.usefixtures("fresh_dispatch")


@pytest.fixture
def plain(rng: np.random.Generator) -> mj.QuantWeight:
    return random_weight(rng, K, N, 64, symmetric=False, dtype=FP16)


@pytest.fixture
def w(plain: mj.QuantWeight) -> mj.MarlinWeight:
    return mj.pack(plain)


def ready(w: mj.MarlinWeight, path: str) -> None:
    """Give the weight what a path needs of it, or skip where cuBLAS is missing."""
    if path == "fp16_cache":
        if not engine._cublas_there():
            pytest.skip("cuBLAS is not installed")
        w.cache_fp16()


def exact_of(x: Any, w64: Any) -> Any:
    rows = cp.ascontiguousarray(x.astype(np.float64)).reshape(-1, x.shape[-1])
    return product(rows, w64).reshape(*x.shape[:-1], w64.shape[1])


def check(y: Any, exact: Any, bound: dict[Any, float] = BOUND) -> None:
    assert y.shape == exact.shape
    error = relative_error(y, exact)
    assert error <= bound[y.dtype], f"relative error {error:.2e}"


def same(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((a.view(np.uint16) == b.view(np.uint16)).all())


# ---- strides and shapes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*PATHS, "fp16_cache"])
def test_strided_x(path: str, plain: Any, w: Any, rng: np.random.Generator) -> None:
    ready(w, path)
    w64 = weight64(plain)
    wide = random_rows(rng, 20, 2 * K + 64, FP16)
    flat = random_rows(rng, 1, 20 * K + 1, FP16)[0]
    cube = random_rows(rng, 30, K, FP16).reshape(2, 15, K)
    for x in (
        wide[:, 64 : 64 + K],
        wide[:, 1 : 1 + K],
        random_rows(rng, K, 20, FP16).T,
        flat[1:].reshape(20, K),
        wide[::-1, :K],
        wide[:, K - 1 :: -1],
        wide[::3, : 2 * K : 2],
        cp.broadcast_to(wide[0, :K], (20, K)),
        wide[3, :K],
        cube,
        cube[:, :10],
        cube[:, ::-1],
        cube.transpose(1, 0, 2),
        cube.reshape(2, 15, 1, K),
    ):
        check(mj.matmul(x, w, path=path), exact_of(x, w64))


@pytest.mark.parametrize("path", PATHS)
def test_strided_out(path: str, plain: Any, w: Any, rng: np.random.Generator) -> None:
    x = random_rows(rng, 20, K, FP16)
    exact = exact_of(x, weight64(plain))
    for place in (
        np.s_[:, 8 : 8 + N],
        np.s_[:, 3 : 3 + N],
        np.s_[:, 1 : 2 * N : 2],
        np.s_[::-1, :N],
    ):
        parent = cp.full((20, 2 * N + 5), 777, FP16)
        out = parent[place]
        assert mj.matmul(x, w, out=out, path=path) is out
        check(out, exact)
        out[...] = 777
        assert bool((parent == 777).all()), "wrote outside the output"
    out = cp.empty((N, 20), FP16).T
    mj.matmul(x, w, out=out, path=path)
    check(out, exact)
    out = cp.empty((4, 8, N), FP16)[:, :5]
    mj.matmul(x.reshape(4, 5, K), w, out=out, path=path)
    check(out, exact.reshape(4, 5, N))


@pytest.mark.parametrize(
    ("columns", "group", "dtype"),
    [
        (100, -1, FP16),
        (100, -1, BF16),
        (104, -1, FP16),
        (97, -1, FP16),
        (96, 32, FP16),
        (8, -1, FP16),
        (1, -1, FP16),
        (320, 64, FP16),
    ],
    ids=str,
)
def test_what_lies_beyond_k_is_not_read(
    columns: int, group: int, dtype: np.dtype, rng: np.random.Generator
) -> None:
    """Neighbours of x are NaN, so a single one that is multiplied, even by zero, shows."""
    qw = random_weight(rng, columns, 72, group, symmetric=False, dtype=dtype)
    packed, w64 = mj.pack(qw), weight64(qw)
    for M in (1, 5, 20, 70):
        parent = cp.full((M + 2, 512), np.nan, np.float32).astype(dtype)
        for first in (0, 8, 3):
            x = parent[1 : M + 1, first : first + columns]
            x[...] = random_rows(rng, M, columns, dtype)
            for path in PATHS:
                check(mj.matmul(x, packed, path=path), exact_of(x, w64), FEW)
            x[...] = np.nan


@pytest.mark.parametrize("columns", [1, 7, 63, 65, 130, 257])
def test_tails_of_n(columns: int, rng: np.random.Generator) -> None:
    qw = random_weight(rng, 128, columns, 32, symmetric=False, dtype=FP16)
    packed, w64 = mj.pack(qw), weight64(qw)
    for M in (3, 20, 70):
        x = random_rows(rng, M, 128, FP16)
        parent = cp.full((M + 2, columns + 7), 777, FP16)
        for path in PATHS:
            for first in (0, 1):
                out = parent[1 : M + 1, first : first + columns]
                mj.matmul(x, packed, out=out, path=path)
                check(out, exact_of(x, w64), FEW)
                out[...] = 777
                assert bool((parent == 777).all()), "wrote outside the output"


def test_no_rows_and_no_dimensions(w: Any, plain: Any) -> None:
    for x in (cp.empty((0, K), FP16), cp.empty((2, 0, K), FP16)):
        y = mj.matmul(x, w)
        assert y.shape == (*x.shape[:-1], N)
        assert mj.matmul(x, plain, bias=cp.ones(N, FP16), out=y) is y
    assert mj.stats() == {}
    for shape in ((), (K - 1,), (3, K + 8), (K, 1)):
        with pytest.raises(ShapeError, match=f"last dimension must be K = {K}"):
            mj.matmul(cp.ones(shape, FP16), w)


# ---- weights --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("group", [1, 16, 48, 96, 192])
def test_any_group_size_runs_natively(group: int, dtype: np.dtype, rng: np.random.Generator) -> None:
    qw = random_weight(rng, 384, 100, group, symmetric=False, dtype=dtype, real_zero=True)
    x, bias = random_rows(rng, 5, 384, dtype), random_rows(rng, 1, 100, dtype)[0]
    check(mj.matmul(x, qw), exact_of(x, weight64(qw)))
    check(mj.matmul(x, qw, bias=bias), exact_of(x, weight64(qw)) + bias.astype(np.float64))
    assert mj.stats() == {"native": 2}


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_activation_order(dtype: np.dtype, rng: np.random.Generator) -> None:
    for k, group in ((256, 64), (96, 32), (384, 128)):
        ordered = random_weight(rng, k, 100, group, symmetric=False, dtype=dtype)
        g_idx = cp.asarray(rng.permutation(np.arange(k) // group).astype(np.int32))
        qw = mj.QuantWeight(ordered.q, ordered.scale, ordered.zero, group, g_idx)
        packed, w64 = mj.pack(qw), weight64(qw)
        assert packed.perm is not None
        for M in (1, 2, 7, 8, 9, 20):
            wide = random_rows(rng, M, k + 3, dtype)
            for x in (wide[:, :k], wide[:, 1 : k + 1], wide[:, ::-1][:, :k]):
                exact = exact_of(x, w64)
                for path in PATHS:
                    check(mj.matmul(x, packed, path=path), exact)
                check(mj.matmul(x, qw), exact)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize(("k", "group"), [(1000, -1), (333, -1), (2048, 128), (1056, 32)])
def test_activation_order_is_exact_on_integers(
    k: int, group: int, dtype: np.dtype, rng: np.random.Generator
) -> None:
    """Sums are exact, so a wrong column is a wrong number; columns beside x are NaN."""
    groups = 1 if group == -1 else k // group
    q = rng.integers(0, 16, (k, N), dtype=np.uint8)
    points = rng.integers(0, 16, (groups, N), dtype=np.uint8)
    scale = np.ones((groups, N), dtype)
    ordered = mj.pack(mj.QuantWeight.from_zero_points(*map(cp.asarray, (q, scale, points)), group))
    perm = rng.permutation(k).astype(np.int32)
    w = replace(ordered, perm=cp.asarray(perm))
    codes = q.astype(np.int64) - np.repeat(points.astype(np.int64), k // groups, axis=0)
    for M in (1, 3, 8, 9, 33):
        a = rng.integers(-1, 2, (M, k))
        expected = (a[:, perm] @ codes).astype(np.float32).astype(dtype)
        wide = cp.full((M, k + 3), np.nan, dtype)
        for at in (0, 1):
            wide[:] = np.nan
            wide[:, at : at + k] = cp.asarray(a.astype(np.float32).astype(dtype))
            x = wide[:, at : at + k]
            for path in ("marlin", "native"):
                assert np.array_equal(mj.matmul(x, w, path=path).get(), expected), (M, at, path)


def test_uneven_groups_run_natively(rng: np.random.Generator) -> None:
    ordered = random_weight(rng, 256, 100, 32, symmetric=False, dtype=FP16)
    g_idx = cp.asarray(rng.integers(0, 8, 256).astype(np.int32))
    qw = mj.QuantWeight(ordered.q, ordered.scale, ordered.zero, 32, g_idx)
    x = random_rows(rng, 7, 256, FP16)
    check(mj.matmul(x, qw), exact_of(x, weight64(qw)))
    with pytest.raises(ShapeError, match="g_idx puts"):
        mj.pack(qw)


def test_bias_of_any_stride(w: Any, plain: Any, rng: np.random.Generator) -> None:
    x = random_rows(rng, 20, K, FP16)
    wide = random_rows(rng, 1, 2 * N + 1, FP16)[0]
    for bias in (wide[:N], wide[1 : N + 1], wide[: 2 * N : 2], wide[N - 1 :: -1]):
        exact = exact_of(x, weight64(plain)) + bias.astype(np.float64)
        for path in PATHS:
            check(mj.matmul(x, w, bias=bias, path=path), exact)
    zeros = cp.zeros((20, K), FP16)
    for path in ("marlin", "native"):
        assert same(mj.matmul(zeros, w, bias=wide[:N], path=path), cp.broadcast_to(wide[:N], (20, N)).copy())


# ---- streams and threads --------------------------------------------------------------------------------


def test_work_goes_to_the_current_stream(w: Any, plain: Any, rng: np.random.Generator) -> None:
    x = random_rows(rng, 20, K, FP16)
    strided = cp.asfortranarray(x)
    for path in PATHS:
        expected = mj.matmul(x, w, path=path)
        cp.cuda.runtime.deviceSynchronize()
        stream = cp.cuda.Stream(non_blocking=True)
        with stream:
            ys = [mj.matmul(x, w, path=path), mj.matmul(strided, w, path=path)]
        stream.synchronize()
        assert all(same(y, expected) for y in ys)


def test_many_threads(w: Any, rng: np.random.Generator) -> None:
    xs = [random_rows(rng, M, K, FP16) for M in (1, 3, 17, 40, 70, 100, 8, 33)]
    expected = [mj.matmul(x, w) for x in xs]
    cp.cuda.runtime.deviceSynchronize()

    def work(i: int) -> bool:
        stream = cp.cuda.Stream(non_blocking=True)
        with stream:
            ys = [mj.matmul(xs[i], w) for _ in range(30)]
        stream.synchronize()
        return all(same(y, expected[i]) for y in ys)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    assert mj.stats() == {"marlin": 8 + 8 * 30}


# ---- arrays of other libraries --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_torch_tensors(name: str, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    dtype = FP16 if name == "float16" else BF16
    qw = random_weight(rng, K, N, 64, symmetric=False, dtype=dtype)
    packed = mj.pack(qw)
    host = rng.standard_normal((3, 5, K)).astype(np.float32)
    x = torch.from_numpy(host).cuda().to(getattr(torch, name))
    bias = torch.ones(N, device="cuda", dtype=x.dtype)
    y = mj.matmul(x, packed, bias=bias)
    assert isinstance(y, cp.ndarray)
    assert y.dtype == dtype
    exact = exact_of(cp.asarray(host.astype(dtype)), weight64(qw)) + 1
    check(y, exact)
    back = torch.from_dlpack(y)
    assert back.dtype == x.dtype
    assert tuple(back.shape) == (3, 5, N)
    assert back.data_ptr() == y.data.ptr
    check(mj.matmul(x.transpose(0, 1), packed), exact.transpose(1, 0, 2) - 1)


def test_torch_tensors_that_cannot_be_read(w: Any) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(DTypeError, match=r"x \(Tensor\) is no array on a GPU that CuPy can read"):
        mj.matmul(torch.ones(2, K, dtype=torch.float16), w)
    if torch.cuda.is_available():
        with pytest.raises(DTypeError, match="x must be float16 or bfloat16, got float32"):
            mj.matmul(torch.ones(2, K, device="cuda"), w)


class OnlyCudaArrayInterface:
    def __init__(self, array: Any) -> None:
        self.__cuda_array_interface__ = array.__cuda_array_interface__
        self.array = array


def test_cuda_array_interface(w: Any, rng: np.random.Generator) -> None:
    x = random_rows(rng, 4, K, FP16)
    assert same(mj.matmul(OnlyCudaArrayInterface(x), w), mj.matmul(x, w))


# ---- errors ---------------------------------------------------------------------------------------------


def test_dtypes(w: Any, rng: np.random.Generator) -> None:
    for dtype in (np.float32, np.float64, np.int32, np.uint8):
        with pytest.raises(DTypeError, match=f"x must be float16 or bfloat16, got {np.dtype(dtype)}"):
            mj.matmul(cp.ones((2, K), dtype), w)
    with pytest.raises(DTypeError, match="x is bfloat16 and the weight float16"):
        mj.matmul(random_rows(rng, 2, K, BF16), w)
    x = random_rows(rng, 2, K, FP16)
    with pytest.raises(DTypeError, match="bias must be float16 like x, got float32"):
        mj.matmul(x, w, bias=cp.ones(N, np.float32))
    with pytest.raises(DTypeError, match="out must be float16 like x, got float32"):
        mj.matmul(x, w, out=cp.empty((2, N), np.float32))
    with pytest.raises(ShapeError, match="out must have shape"):
        mj.matmul(x, w, out=cp.empty((2, N + 1), FP16))


def test_arrays_of_two_sides(w: Any, rng: np.random.Generator) -> None:
    x = random_rows(rng, 2, K, FP16)
    with pytest.raises(DeviceError, match=r"x is a NumPy array and the weight holds CuPy .*w\.to_host\(\)"):
        mj.matmul(x.get(), w)
    with pytest.raises(DeviceError, match=r"x is a CuPy array and the weight holds NumPy .*w\.to_device\(\)"):
        mj.matmul(x, w.to_host())
    with pytest.raises(DeviceError, match="x and bias must both"):
        mj.matmul(x, w, bias=np.ones(N, FP16))
    with pytest.raises(DeviceError, match="x and out must both"):
        mj.matmul(x, w, out=np.empty((2, N), FP16))
    assert mj.matmul(x.get(), w.to_host()).shape == (2, N)


def test_out_that_overlaps(rng: np.random.Generator) -> None:
    packed = mj.pack(random_weight(rng, 64, 64, 32, symmetric=True, dtype=FP16))
    memory = random_rows(rng, 6, 64, FP16)
    for out in (memory[:4], memory[2:], memory[3::-1]):
        with pytest.raises(ValueRangeError, match="out overlaps x"):
            mj.matmul(memory[:4], packed, out=out)
    with pytest.raises(ValueRangeError, match="out overlaps bias"):
        mj.matmul(random_rows(rng, 4, 64, FP16), packed, bias=memory[1], out=memory[:4])
    mj.matmul(memory[:3], packed, out=memory[3:])


# ---- which path, how often ------------------------------------------------------------------------------


def test_switched_off(w: Any, plain: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    x = random_rows(rng, 20, K, FP16)
    exact = exact_of(x, weight64(plain))
    assert mj.explain(x, w).path == "marlin"
    assert mj.explain(x, plain).path == "native"
    with mj.dispatch(False):
        assert mj.explain(x, w).path == "native"
        check(mj.matmul(x, w), exact)
    monkeypatch.setenv("MARLIN_JIT_USE_MARLIN", "0")
    check(x @ w, exact)
    mj.set_dispatch(True)
    check(x @ w, exact)
    assert mj.stats() == {"native": 2, "marlin": 1}


def test_counts_and_first_dispatch(
    w: Any, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    x = random_rows(rng, 20, K, FP16)
    with caplog.at_level(logging.INFO, logger="marlin_jit.dispatch"):
        for path in (*PATHS, None, "native"):
            mj.matmul(x, w, path=path)
    assert mj.stats() == {"marlin": 2, "marlin_pair": 1, "native": 2}
    lines = [r.getMessage() for r in caplog.records if r.name == "marlin_jit.dispatch"]
    assert lines == [f"first dispatch: {path}, M=20 N={N} K={K} group=64" for path in PATHS]


def test_a_refused_launch_falls_to_the_next_path(
    w: Any,
    plain: Any,
    rng: np.random.Generator,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []

    def refuse(*arguments: Any, gated: bool) -> None:
        tried.append(arguments)
        raise LaunchError("out of registers")

    monkeypatch.setattr(launch, "marlin", refuse)
    x = random_rows(rng, 20, K, FP16)
    for _ in range(3):
        check(mj.matmul(x, w), exact_of(x, weight64(plain)))
    assert len(tried) == 1
    assert mj.stats() == {"native": 3}
    warned = [
        r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and r.name == engine.__name__
    ]
    assert warned == ["path marlin is refused, the next one is taken from now on: out of registers"]
    assert mj.explain(x, w).path == "native"


# ---- the FP16 cache -------------------------------------------------------------------------------------


def test_fp16_cache(w: Any, rng: np.random.Generator) -> None:
    ready(w, "fp16_cache")
    x, bias = random_rows(rng, 20, K, FP16), random_rows(rng, 1, N, FP16)[0]
    assert mj.explain(x, w).path == "fp16_cache"
    exact = exact_of(x, mj.dequantize(w).astype(np.float64))
    check(mj.matmul(x, w), exact)
    check(mj.matmul(x, w, bias=bias), exact + bias.astype(np.float64))
    out = cp.full((20, N + 4), 777, FP16)
    mj.matmul(x, w, out=out[:, 2 : N + 2])
    check(out[:, 2 : N + 2], exact)
    assert bool((out[:, :2] == 777).all() and (out[:, N + 2 :] == 777).all())
    assert mj.stats() == {"fp16_cache": 3}
    with mj.dispatch(False):
        assert mj.explain(x, w).path == "fp16_cache"
    w.drop_fp16()
    assert mj.explain(x, w).path == "marlin"


@pytest.mark.parametrize("path", [*PATHS, "fp16_cache"])
def test_captured_after_a_first_call(path: str, w: Any, plain: Any, rng: np.random.Generator) -> None:
    ready(w, path)
    w64 = weight64(plain)
    x, bias = random_rows(rng, 20, K, FP16), random_rows(rng, 1, N, FP16)[0]
    out = cp.empty((20, N), FP16)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.runtime.deviceSynchronize()
    with stream:
        mj.matmul(x, w, bias=bias, out=out, path=path)
        stream.begin_capture()
        mj.matmul(x, w, bias=bias, out=out, path=path)
        graph = stream.end_capture()
        for _ in range(3):
            x[...] = random_rows(rng, 20, K, FP16)
            out[...] = np.nan
            graph.launch(stream)
            check(out, exact_of(x, w64) + bias.astype(np.float64))
    stream.synchronize()


def test_a_capture_that_needs_memory_says_so(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a silent other path, and nothing counts as refused."""
    fresh = device.Scratch()
    monkeypatch.setattr(engine, "scratch", fresh)
    monkeypatch.setattr(launch, "scratch", fresh)
    packed = mj.pack(random_weight(rng, 100, N, -1, symmetric=False, dtype=FP16))
    x, out = (
        random_rows(rng, 20, 100, FP16),
        cp.empty((20, N), FP16),
    )  # rows of 200 bytes: copied to scratch memory
    mj.matmul(x, packed, out=out)
    expected = out.copy()
    mj.reset_stats()
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.runtime.deviceSynchronize()
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(LaunchError, match="would have to grow"):
                mj.matmul(x, packed, out=out)
        finally:
            stream.end_capture()
        assert mj.stats() == {}
        assert engine._refused == {}
        mj.matmul(x, packed, out=out)
    stream.synchronize()
    assert same(out, expected)
    assert mj.stats() == {"marlin": 1}


def test_steady_state_allocates_nothing(rng: np.random.Generator) -> None:
    ordered = random_weight(rng, 2048, N, 64, symmetric=False, dtype=FP16)
    g_idx = cp.asarray(rng.permutation(np.arange(2048) // 64).astype(np.int32))
    weights = [
        mj.pack(ordered),
        mj.pack(mj.QuantWeight(ordered.q, ordered.scale, ordered.zero, 64, g_idx)),
        ordered,
    ]
    bias = random_rows(rng, 1, N, FP16)[0]
    wide = random_rows(rng, 200, 2056, FP16)
    inputs = [(wide[:M, at : at + 2048], cp.empty((M, N), FP16)) for M in (1, 20, 200) for at in (0, 1)]

    def calls() -> None:
        for weight in weights:
            for x, out in inputs:
                mj.matmul(x, weight, bias=bias, out=out)
                if weight is not ordered:
                    mj.matmul(x, weight, out=out, path="marlin_pair")

    gc.collect()  # what other tests left

    def refuse(size: int) -> Any:
        raise AssertionError(f"{size} bytes were allocated")

    calls()
    pool = cp.get_default_memory_pool()
    before = pool.used_bytes(), pool.total_bytes()
    with cp.cuda.using_allocator(refuse):
        for _ in range(7):
            calls()
    assert (pool.used_bytes(), pool.total_bytes()) == before


# ---- two devices ----------------------------------------------------------------------------------------


def test_a_weight_of_another_device_than_the_current_one(w: Any, rng: np.random.Generator) -> None:
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    x = random_rows(rng, 20, K, FP16)
    expected = {path: mj.matmul(x, w, path=path).get() for path in PATHS}
    with cp.cuda.Device(1):
        other_x, other_w = cp.asarray(x.get()), w.to_host().to_device()
    assert cp.cuda.runtime.getDevice() == 0
    for path in PATHS:
        y = mj.matmul(other_x, other_w, path=path)
        assert cp.cuda.runtime.getDevice() == 0
        assert y.device.id == 1
        with cp.cuda.Device(1):
            cp.cuda.runtime.deviceSynchronize()
            assert_same_bits(y.get(), expected[path])
    with pytest.raises(DeviceError, match="x lies on device 0, the weight on device 1"):
        mj.matmul(x, other_w)
    with cp.cuda.Device(1):
        out = cp.empty((20, N), FP16)
    with pytest.raises(DeviceError, match="x lies on device 0, out on device 1"):
        mj.matmul(x, w, out=out)
