"""GPTQ on a GPU: the codes of the host, but for weights that lie in the middle between two."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from marlin_jit.errors import DeviceError, DTypeError, ValueRangeError
from marlin_jit.gptq_quantize import gptq, hessian
from marlin_jit.pack import dequantize, pack

cp = pytest.importorskip("cupy")
BF16 = ml_dtypes.bfloat16


@pytest.fixture(autouse=True)
def libraries():
    """The extras bring neither cuBLAS nor cuSOLVER."""
    try:
        gptq(cp.ones((4, 4), np.float16), cp.eye(4), 4)
    except DeviceError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("K", "N", "group_size", "symmetric", "act_order", "dtype"),
    [
        (512, 300, 128, False, False, np.float16),
        (320, 96, 64, True, False, BF16),
        (512, 128, 32, False, True, np.float16),
        (200, 70, -1, False, False, np.float16),
    ],
)
def test_equal_to_the_host(K, N, group_size, symmetric, act_order, dtype, rng):
    w = (0.02 * rng.standard_normal((K, N))).astype(np.float32).astype(dtype)
    directions = rng.standard_normal((K // 4, K)) / np.sqrt(K / 4)
    x = (rng.standard_normal((2 * K, K // 4)) @ directions + 0.3 * rng.standard_normal((2 * K, K))).astype(
        dtype
    )
    x[:, 3] = 0
    H = hessian(x)
    on_device = hessian(cp.asarray(x))
    assert on_device.dtype == np.float64
    assert np.abs(on_device.get() - H).max() <= 1e-5 * H.max()
    host = gptq(w, H, group_size, symmetric, dtype, act_order=act_order)
    device = gptq(cp.asarray(w), cp.asarray(H), group_size, symmetric, dtype, act_order=act_order)
    assert isinstance(device.q, cp.ndarray)
    # Columns are independent; one that differs anywhere differs from there on.
    same = (device.q.get() == host.q).all(axis=0)
    assert same.mean() >= 0.9
    if act_order:
        assert np.array_equal(device.g_idx.get(), host.g_idx)
    mine, theirs = dequantize(pack(device), np.float32).get(), dequantize(host, np.float32)
    errors = [np.linalg.norm(x.astype(np.float64) @ (q - w.astype(np.float64))) for q in (mine, theirs)]
    assert errors[0] == pytest.approx(errors[1], rel=0.02)


def test_refused():
    w, H = cp.ones((32, 4), np.float32), cp.eye(32)
    with pytest.raises(DTypeError, match="NumPy and CuPy arrays are mixed"):
        gptq(w, np.eye(32), 32)
    H[3, 4] = H[4, 3] = 9
    with pytest.raises(ValueRangeError, match="not positive definite after damping"):
        gptq(w, H, 32)
    H[3, 4] = np.nan
    with pytest.raises(ValueRangeError, match=r"hessian\[3, 4\] is nan"):
        gptq(w, H, 32)
