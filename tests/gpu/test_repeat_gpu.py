"""Calls that are launched as one before them: the same bits and counts, and nothing taken for granted."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest
from exact import product, random_rows, random_weight, relative_error, weight64

import marlin_jit as mj
from marlin_jit.errors import DTypeError, ShapeError, ValueRangeError

cp = pytest.importorskip("cupy")
engine = import_module("marlin_jit.dispatch")

FP16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
K, N = 256, 192

pytestmark = pytest.mark.usefixtures("fresh_dispatch")


def long_way(*arguments: Any, **named: Any) -> Any:
    """The product without a look at what was before."""
    with patch.object(engine, "_again", return_value=None):
        return mj.matmul(*arguments, **named)


def refuse_long_way() -> Any:
    return patch.object(engine, "_checked", side_effect=AssertionError("the long way"))


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("shape", [(K,), (1, K), (8, K), (2, 3, K), (40, K), (300, K)])
def test_a_second_call_is_a_repeat_with_the_same_bits(shape: Any, dtype: Any, rng: Any) -> None:
    qw = random_weight(rng, K, N, 64, symmetric=False, dtype=dtype)
    w = mj.pack(qw)
    rows = int(np.prod(shape[:-1]))
    xs = [random_rows(rng, rows, K, dtype).reshape(shape) for _ in range(3)]
    bias = random_rows(rng, 1, N, dtype)[0]
    for named in ({}, {"bias": bias}, {"out": cp.empty((*shape[:-1], N), dtype)}):
        mj.matmul(xs[0], w, **named)
        with refuse_long_way():
            for x in xs:
                y = mj.matmul(x, w, **named).copy()
                assert y.shape == (*shape[:-1], N)
                assert y.dtype == dtype
                exact = product(x.reshape(rows, K).astype(np.float64), weight64(qw))
                exact = exact + (bias.astype(np.float64) if "bias" in named else 0)
                assert relative_error(y.reshape(rows, N), exact) < {FP16: 1e-3, BF16: 8e-3}[dtype]
        for x in xs:
            again, first = mj.matmul(x, w, **named).copy(), long_way(x, w, **named)
            assert bool((again.view(np.uint16) == first.view(np.uint16)).all())
    assert set(mj.stats()) == {"marlin"}


def test_repeats_are_counted(rng: Any) -> None:
    w = mj.pack(random_weight(rng, K, N, 64, symmetric=True, dtype=FP16))
    x = random_rows(rng, 5, K, FP16)
    for _ in range(4):
        mj.matmul(x, w)
    assert mj.stats_by_shape() == {("marlin", 5, N, K, 64): 4}


def test_swiglu_is_repeated_apart_from_the_plain_product(rng: Any) -> None:
    gate, up = (random_weight(rng, K, N, 64, symmetric=True, dtype=FP16) for _ in range(2))
    w = mj.pack_gate_up(gate, up)
    x = random_rows(rng, 5, K, FP16)
    plain, activated = mj.matmul(x, w.packed), mj.matmul_swiglu(x, w)
    with refuse_long_way():
        assert bool((mj.matmul(x, w.packed) == plain).all())
        assert bool((mj.matmul_swiglu(x, w) == activated).all())


def test_what_differs_goes_the_long_way(rng: Any) -> None:
    w = mj.pack(random_weight(rng, K, N, 64, symmetric=True, dtype=FP16))
    wide = random_rows(rng, 10, K + 8, FP16)
    x = random_rows(rng, 5, K, FP16)
    expected = mj.matmul(x, w)
    bias, out = random_rows(rng, 1, N, FP16)[0], cp.empty((5, N), FP16)
    mj.matmul(x, w, bias=bias, out=out)
    # Other strides, other alignment: right, by the long way.
    for other in (wide[:5, :K], wide[:5, 1 : K + 1], wide[::2, 8 : K + 8]):
        y = mj.matmul(other, w)
        assert bool((y == mj.matmul(cp.ascontiguousarray(other), w)).all())
    for bad, error in (
        ({"bias": bias.astype(np.float32)}, DTypeError),
        ({"bias": bias[:-1]}, ShapeError),
        ({"out": cp.empty((5, N + 1), FP16)}, ShapeError),
        ({"out": cp.empty((5, N), np.float32)}, DTypeError),
    ):
        with pytest.raises(error):
            mj.matmul(x, w, **bad)
    with pytest.raises(DTypeError):
        mj.matmul(x.astype(np.float32), w)
    memory = cp.empty(5 * K + 5 * N, FP16)
    inside = memory[: 5 * K].reshape(5, K)
    inside[...] = x
    with pytest.raises(ValueRangeError, match="overlaps x"):
        mj.matmul(inside, w, out=memory[5 * K - 8 : 5 * K - 8 + 5 * N].reshape(5, N))
    strided = cp.empty((5, 2 * N), FP16)[:, ::2]
    assert bool((mj.matmul(x, w, out=strided) == expected).all())


def test_switches_are_still_asked(rng: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    w = mj.pack(random_weight(rng, K, N, 64, symmetric=True, dtype=FP16))
    x = random_rows(rng, 5, K, FP16)
    for _ in range(2):
        mj.matmul(x, w)
    with mj.dispatch(False):
        mj.matmul(x, w)
    monkeypatch.setenv("MARLIN_JIT_USE_MARLIN", "0")
    mj.matmul(x, w)
    monkeypatch.delenv("MARLIN_JIT_USE_MARLIN")
    assert mj.stats() == {"marlin": 2, "native": 2}
    if engine._cublas_there():
        w.cache_fp16()
        mj.matmul(x, w)
        assert mj.stats() == {"marlin": 2, "native": 2, "fp16_cache": 1}
        w.drop_fp16()
    mj.matmul(x, w)
    assert mj.stats()["marlin"] == 3


def test_streams_and_threads_repeat_their_own(rng: Any) -> None:
    """Split products keep partial sums in memory of the stream: no two streams may share it."""
    w = mj.pack(random_weight(rng, 4096, 512, 128, symmetric=True, dtype=FP16))
    xs = [random_rows(rng, 16, 4096, FP16) for _ in range(4)]
    expected = [mj.matmul(x, w).get() for x in xs]

    def work(i: int) -> bool:
        stream = cp.cuda.Stream(non_blocking=True)
        with stream:
            fine = all(np.array_equal(mj.matmul(xs[i], w).get(), expected[i]) for _ in range(50))
        stream.synchronize()
        return fine

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_a_repeat_can_be_captured(rng: Any) -> None:
    w = mj.pack(random_weight(rng, 1024, 512, 128, symmetric=True, dtype=FP16))
    x, out = random_rows(rng, 3, 1024, FP16), cp.empty((3, 512), FP16)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        expected = mj.matmul(x, w, out=out).get()
        stream.begin_capture()
        with refuse_long_way():
            mj.matmul(x, w, out=out)
        graph = stream.end_capture()
        for _ in range(3):
            out.fill(np.nan)
            graph.launch(stream)
            assert np.array_equal(out.get(), expected)


def test_a_chain_of_dependent_products_that_overlap(rng: Any) -> None:
    """Each reads what the one before it wrote, and writes what the one before that read."""
    qws = [random_weight(rng, 512, 512, 128, symmetric=True, dtype=FP16) for _ in range(3)]
    ws = [mj.pack(qw) for qw in qws]
    for M in (1, 8, 16, 40, 130):
        x = 0.05 * random_rows(rng, M, 512, np.float32)
        a, b = x.astype(FP16), cp.empty((M, 512), FP16)
        expected = a
        for i in range(60):
            expected = long_way(expected, ws[i % 3])
            cp.cuda.get_current_stream().synchronize()
            expected = expected / (2 * abs(expected).max())
        stream = cp.cuda.Stream(non_blocking=True)
        with stream:
            y = a.copy()
            for i in range(60):
                mj.matmul(y, ws[i % 3], out=b)
                cp.copyto(y, b / (2 * abs(b).max()))
            assert bool((y == expected).all())
            # And with nothing in between: all within one graph, against products one by one.
            chain = [y, *(cp.empty((M, 512), FP16) for _ in range(9))]
            for i in range(9):
                mj.matmul(chain[i], ws[i % 3], out=chain[i + 1])
            one_by_one = [c.copy() for c in chain]
            for i in range(9):
                stream.synchronize()
                mj.matmul(one_by_one[i], ws[i % 3], out=one_by_one[i + 1])
            stream.begin_capture()
            for i in range(9):
                mj.matmul(chain[i], ws[i % 3], out=chain[i + 1])
            graph = stream.end_capture()
            for _ in range(20):
                for c in chain[1:]:
                    c.fill(np.nan)
                graph.launch(stream)
                assert all(bool((c == d).all()) for c, d in zip(chain, one_by_one, strict=True))


def test_a_thread_that_made_no_call_of_cuda_yet(rng: Any) -> None:
    """It has a current device, but no context of the driver until something binds it."""
    w = mj.pack(random_weight(rng, K, N, 64, symmetric=True, dtype=FP16))
    x, out = random_rows(rng, 5, K, FP16), cp.empty((5, N), FP16)
    expected = mj.matmul(x, w).get()
    cp.cuda.Device().synchronize()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            mj.matmul(x, w, out=out)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    cp.cuda.Device().synchronize()
    assert not failures
    assert np.array_equal(out.get(), expected)
    assert mj.stats() == {"marlin": 2}
