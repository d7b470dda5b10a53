"""Packing on a GPU: to the bit what the same functions give on the host, in bounded memory, and fast."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from helpers import assert_same_bits, random_codes, random_scales

from marlin_jit.errors import DTypeError, ShapeError, ValueRangeError
from marlin_jit.pack import dequantize, pack, unpack
from marlin_jit.quantize import quantize
from marlin_jit.weight import MarlinWeight, QuantWeight

cp = pytest.importorskip("cupy")
BF16 = ml_dtypes.bfloat16

SHAPES = [(64, 64, 32), (4096, 4096, 128), (320, 1000, 64), (96, 70, 32), (2048, 576, -1), (17, 3, -1)]


def random_weight(K, N, group_size, dtype, kind):
    rng = np.random.default_rng(K + N)
    groups = 1 if group_size == -1 else K // group_size
    q, scale = random_codes(rng, K, N), random_scales(rng, groups, N, dtype)
    if kind == "symmetric":
        return QuantWeight(q, scale, None, group_size)
    if kind == "real zeros":
        return QuantWeight(q, scale, rng.standard_normal((groups, N)).astype(dtype), group_size)
    g_idx = (
        rng.permutation(np.arange(K) // (K // groups)).astype(np.int32)
        if kind == "activation order"
        else None
    )
    return QuantWeight.from_zero_points(q, scale, rng.integers(0, 17, (groups, N)), group_size, g_idx)


def assert_same_arrays(device, host, names):
    for name in names:
        on_device, on_host = getattr(device, name), getattr(host, name)
        assert (on_device is None) == (on_host is None), name
        if on_host is not None:
            assert isinstance(on_device, cp.ndarray), name
            assert_same_bits(on_device.get(), on_host)


@pytest.mark.parametrize("kind", ["symmetric", "zero points", "real zeros", "activation order"])
@pytest.mark.parametrize("dtype", [np.float16, BF16])
@pytest.mark.parametrize("shape", SHAPES)
def test_equal_to_the_host(shape, dtype, kind):
    host = random_weight(*shape, dtype, kind)
    device = host.to_device()
    assert_same_arrays(device, host, ("q", "scale", "zero", "g_idx"))
    host_packed, packed = pack(host), pack(device)
    assert_same_arrays(packed, host_packed, ("B", "scales", "delta", "delta16", "points16", "perm"))
    assert_same_arrays(unpack(packed), unpack(host_packed), ("q", "scale", "zero", "g_idx"))
    for out in (dtype, np.float32):
        assert_same_bits(dequantize(device, out).get(), dequantize(host, out))
        assert_same_bits(dequantize(packed, out).get(), dequantize(host_packed, out))
    other = BF16 if dtype == np.float16 else np.float16
    assert_same_arrays(packed.astype(other), host_packed.astype(other), ("scales", "delta"))
    assert packed.to_device() is packed
    assert_same_bits(packed.to_host().B, host_packed.B)
    assert_same_bits(host_packed.to_device().B.get(), host_packed.B)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("source", [np.float16, BF16, np.float32])
@pytest.mark.parametrize("dtype", [np.float16, BF16])
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize_is_equal_to_the_host(shape, dtype, source, symmetric):
    K, N, group_size = shape
    w = np.random.default_rng(K).standard_normal((K, N), dtype=np.float32).astype(source)
    w[:, 0] = 0
    w[:, 1] = 3
    host, device = (
        quantize(w, group_size, symmetric, dtype),
        quantize(cp.asarray(w), group_size, symmetric, dtype),
    )
    assert_same_arrays(device, host, ("q", "scale", "zero"))


def test_from_zero_points_is_equal_to_the_host(rng):
    q, scale = random_codes(rng, 128, 64), random_scales(rng, 4, 64)
    zero_point = rng.integers(0, 17, (4, 64)).astype(np.uint8)
    host = QuantWeight.from_zero_points(q, scale, zero_point, 32)
    device = QuantWeight.from_zero_points(cp.asarray(q), cp.asarray(scale), cp.asarray(zero_point), 32)
    assert_same_arrays(device, host, ("q", "scale", "zero"))
    eights = cp.full((4, 64), 8, np.int32)
    assert QuantWeight.from_zero_points(cp.asarray(q), cp.asarray(scale), eights, 32).symmetric


def test_bad_values_are_found_on_the_device(rng):
    q, scale = cp.asarray(random_codes(rng, 64, 64)), cp.ones((2, 64), np.float16)
    bad_q = q.copy()
    bad_q[3, 7] = 16
    with pytest.raises(ValueRangeError, match=r"q: 1 of 4096 values outside 0..15, the first at \[3, 7\]"):
        QuantWeight(bad_q, scale, None, 32)
    scale[1, 5] = np.nan
    with pytest.raises(
        ValueRangeError, match=r"scale: 1 of 128 values NaN or infinite, the first at \[1, 5\]"
    ):
        QuantWeight(q, scale, None, 32)
    with pytest.raises(DTypeError, match="mixed"):
        QuantWeight(q, scale.get(), None, 32)
    w = cp.ones((64, 5), np.float16)
    w[37, 2] = np.inf
    with pytest.raises(ValueRangeError, match=r"w\[37, 2\] is inf"):
        quantize(w, 32)
    zeros = cp.zeros((4, 128), np.int32)
    with pytest.raises(ValueRangeError, match="not those of a permutation"):
        MarlinWeight(zeros, cp.ones((1, 64), np.float16), None, (64, 64), -1, cp.zeros(64, np.int32))
    with pytest.raises(ShapeError, match="g_idx puts"):
        pack(QuantWeight(q, cp.ones((2, 64), np.float16), None, 32, cp.zeros(64, np.int32)))


def test_strided_arrays(rng):
    q, scale = random_codes(rng, 64, 128), random_scales(rng, 2, 128)
    expected = pack(QuantWeight(q, scale, None, 32))
    strided = QuantWeight(cp.asarray(q.T.copy()).T, cp.asarray(np.repeat(scale, 2, axis=1))[:, ::2], None, 32)
    assert_same_bits(pack(strided).B.get(), expected.B)
    assert_same_bits(pack(strided).scales.get(), expected.scales)


def test_fp16_cache_is_on_the_device(rng):
    packed = pack(QuantWeight(random_codes(rng, 64, 70), random_scales(rng, 2, 70), None, 32)).to_device()
    assert_same_bits(packed.cache_fp16().fp16_cache.get(), dequantize(packed.to_host()))


def test_weights_of_another_device_than_the_current_one(rng):
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    host = QuantWeight(random_codes(rng, 64, 64), random_scales(rng, 2, 64), None, 32)
    with cp.cuda.Device(1):
        device = host.to_device()
    with cp.cuda.Device(0):
        packed = pack(device)
        W = dequantize(packed)
    assert packed.B.device.id == W.device.id == 1
    assert_same_bits(W.get(), dequantize(host))


@pytest.fixture
def large_weight():
    """Codes for 235 million weights, as a large MLP has them."""
    q = cp.random.randint(0, 16, (8192, 28672), dtype=np.uint8)
    scale = cp.random.random((64, 28672), dtype=np.float32).astype(np.float16)
    return QuantWeight.from_zero_points(q, scale, cp.random.randint(0, 16, scale.shape, dtype=np.int32), 128)


@pytest.mark.parametrize("shuffled", [False, True])
def test_extra_memory_is_below_the_codes(large_weight, shuffled):
    g_idx = cp.random.permutation(cp.arange(8192, dtype=np.int32) // 128) if shuffled else None
    weight = QuantWeight(large_weight.q, large_weight.scale, large_weight.zero, 128, g_idx)
    pool = cp.cuda.MemoryPool()
    with cp.cuda.using_allocator(pool.malloc):
        packed = pack(weight)
        assert pool.total_bytes() - packed.nbytes < weight.q.nbytes
        del packed


def test_throughput(large_weight, capsys):
    rates = {}
    packed = pack(large_weight)
    for name, function, argument in [
        ("pack", pack, large_weight),
        ("unpack", unpack, packed),
        ("dequantize", dequantize, packed),
    ]:
        seconds = []
        for _ in range(4):
            start, stop = cp.cuda.Event(), cp.cuda.Event()
            start.record()
            function(argument)
            stop.record()
            stop.synchronize()
            seconds.append(cp.cuda.get_elapsed_time(start, stop) / 1e3)
        rates[name] = large_weight.q.size / min(seconds) / 1e9
    with capsys.disabled():
        print("\nbillion weights/s: " + ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items()))
    assert rates["pack"] >= 20
