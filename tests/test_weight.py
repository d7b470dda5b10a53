"""What the two weight classes accept, what they refuse and how they say it."""

from __future__ import annotations

import dataclasses
import sys
import types

import ml_dtypes
import numpy as np
import pytest
from helpers import assert_same_bits, random_codes, random_scales

import marlin_jit
from marlin_jit import layout
from marlin_jit._array import namespace
from marlin_jit.errors import DeviceError, DTypeError, MarlinJitError, ShapeError, ValueRangeError
from marlin_jit.pack import dequantize, pack
from marlin_jit.quantize import quantize
from marlin_jit.weight import MarlinWeight, QuantWeight

BF16 = ml_dtypes.bfloat16
FP16 = np.dtype(np.float16)


def parts(K=128, N=64, groups=2, dtype=np.float16):
    """Sound arguments of a QuantWeight with 64 rows a group."""
    rng = np.random.default_rng(7)
    return {
        "q": random_codes(rng, K, N),
        "scale": random_scales(rng, groups, N, dtype),
        "zero": rng.standard_normal((groups, N)).astype(dtype),
        "group_size": K // groups,
    }


def marlin_parts(**changes):
    """Sound arguments of a MarlinWeight, some of them replaced."""
    weight = pack(QuantWeight(**parts()))
    names = ("B", "scales", "delta", "shape", "group_size", "perm")
    return {name: getattr(weight, name) for name in names} | changes


BOTH_KINDS = [lambda: QuantWeight(**parts()), lambda: MarlinWeight(**marlin_parts())]


def with_value(array, index, value):
    array = array.copy()
    array[index] = value
    return array


def test_properties():
    weight = QuantWeight(**parts(K=128, N=96))
    assert (weight.shape, weight.K, weight.N, weight.groups) == ((128, 96), 128, 96, 2)
    assert weight.dtype == np.float16 and not weight.symmetric
    assert weight.nbytes == 128 * 96 + 2 * (2 * 96 * 2)
    packed = pack(weight)
    assert (packed.shape, packed.K, packed.N, packed.groups) == ((128, 96), 128, 96, 2)
    assert packed.padded_shape == (128, 128)
    assert packed.dtype == np.float16 and not packed.symmetric
    assert packed.nbytes == 128 * 128 // 2 + 2 * 128 * (2 + 4)


@pytest.mark.parametrize("make", BOTH_KINDS)
def test_weights_are_frozen(make):
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().group_size = 32


@pytest.mark.parametrize("group_size", [128, -1])
def test_a_group_as_long_as_k_is_one_group_a_column(group_size):
    weight = QuantWeight(**parts(groups=1) | {"group_size": group_size})
    assert weight.group_size == -1 and weight.groups == 1
    packed = MarlinWeight(pack(weight).B, pack(weight).scales, None, (128, 64), group_size)
    assert packed.group_size == -1 and packed.groups == 1


def test_any_divisor_is_a_group_size():
    for group_size in (1, 3, 5, 15, 50, 75):
        weight = QuantWeight(
            np.zeros((150, 3), np.uint8), np.ones((150 // group_size, 3), np.float16), None, group_size
        )
        assert weight.groups * weight.group_size == 150


def test_zero_may_be_float32():
    zero = parts()["zero"].astype(np.float32)
    assert QuantWeight(**parts() | {"zero": zero}).zero is zero


def test_strided_arrays_are_copied_and_others_kept():
    plain = QuantWeight(**parts())
    strided = QuantWeight(
        np.asfortranarray(plain.q), np.repeat(plain.scale, 2, axis=1)[:, ::2], plain.zero[::-1][::-1], 64
    )
    assert strided.q.flags.c_contiguous and strided.scale.flags.c_contiguous
    assert np.array_equal(strided.q, plain.q) and np.array_equal(strided.scale, plain.scale)
    assert QuantWeight(plain.q, plain.scale, None, 64).q is plain.q


def test_strided_arrays_of_a_packed_weight_are_copied():
    arguments = marlin_parts()
    B, scales = np.asfortranarray(arguments["B"]), np.repeat(arguments["scales"], 2, axis=0)[::2]
    weight = MarlinWeight(**arguments | {"B": B, "scales": scales})
    assert weight.B.flags.c_contiguous and weight.scales.flags.c_contiguous
    assert_same_bits(weight.B, arguments["B"])
    assert_same_bits(dequantize(weight), dequantize(MarlinWeight(**arguments)))


def test_group_index_of_a_single_group_is_dropped():
    arguments = parts(groups=1) | {"group_size": -1}
    weight = QuantWeight(**arguments, g_idx=np.zeros(128, np.int32))
    assert weight.g_idx is None and weight.group_size == -1
    with pytest.raises(
        ValueRangeError, match=r"g_idx: 1 of 128 values outside the 1 groups, the first at \[5\]"
    ):
        QuantWeight(**arguments, g_idx=with_value(np.zeros(128, np.int32), 5, 1))


REFUSED = {
    "q int8": ({"q": np.zeros((128, 64), np.int8)}, DTypeError, "q must be uint8, got int8"),
    "q list": ({"q": [[1]]}, DTypeError, "expected a NumPy or CuPy array, got list"),
    "q 1-D": ({"q": np.zeros(128, np.uint8)}, ShapeError, r"q must have 2 dimensions, got shape \(128,\)"),
    "q empty": ({"q": np.zeros((0, 64), np.uint8)}, ShapeError, "q is empty"),
    "q no columns": ({"q": np.zeros((128, 0), np.uint8)}, ShapeError, "q is empty"),
    "code 16": (
        {"q": with_value(np.zeros((128, 64), np.uint8), ([3, 9], [7, 0]), 16)},
        ValueRangeError,
        r"q: 2 of 8192 values outside 0..15, the first at \[3, 7\]",
    ),
    "scale float32": (
        {"scale": np.ones((2, 64), np.float32)},
        DTypeError,
        "float16 or bfloat16, got float32",
    ),
    "scale float64": ({"scale": np.ones((2, 64))}, DTypeError, "float16 or bfloat16, got float64"),
    "scale big-endian": ({"scale": np.ones((2, 64), ">f2")}, DTypeError, "float16 or bfloat16, got >f2"),
    "scale too narrow": (
        {"scale": np.ones((2, 32), np.float16)},
        ShapeError,
        r"shape \(2, 64\).*got \(2, 32\)",
    ),
    "scale transposed": (
        {"scale": np.ones((64, 2), np.float16)},
        ShapeError,
        r"shape \(2, 64\).*got \(64, 2\)",
    ),
    "scale NaN": (
        {"scale": with_value(np.ones((2, 64), np.float16), (1, 5), np.nan)},
        ValueRangeError,
        r"scale: 1 of 128 values NaN or infinite, the first at \[1, 5\]",
    ),
    "scale infinite": (
        {"scale": with_value(np.ones((2, 64), np.float16), (0, slice(8, 11)), -np.inf)},
        ValueRangeError,
        r"scale: 3 of 128 values NaN or infinite, the first at \[0, 8\]",
    ),
    "zero dtype": (
        {"zero": np.ones((2, 64), BF16)},
        DTypeError,
        "zero must be float16 or float32, got bfloat16",
    ),
    "zero shape": ({"zero": np.ones((1, 64), np.float16)}, ShapeError, r"zero must have shape \(2, 64\)"),
    "zero NaN": (
        {"zero": with_value(np.ones((2, 64), np.float32), (1, 63), np.nan)},
        ValueRangeError,
        r"zero: 1 of 128 values NaN or infinite, the first at \[1, 63\]",
    ),
    "group 48": ({"group_size": 48}, ShapeError, "group size 48 does not divide K = 128"),
    "group 0": ({"group_size": 0}, ShapeError, "group_size must be positive, or -1"),
    "group -2": ({"group_size": -2}, ShapeError, "group_size must be positive, or -1"),
    "group 64.0": ({"group_size": 64.0}, DTypeError, "group_size must be an integer, got float"),
    "group 32": ({"group_size": 32}, ShapeError, r"scale must have shape \(4, 64\)"),
    "g_idx int64": ({"g_idx": np.zeros(128, np.int64)}, DTypeError, "g_idx must be int32, got int64"),
    "g_idx short": ({"g_idx": np.zeros(127, np.int32)}, ShapeError, r"g_idx must have shape \(128,\)"),
    "g_idx 2": (
        {"g_idx": with_value(np.zeros(128, np.int32), 17, 2)},
        ValueRangeError,
        r"g_idx: 1 of 128 values outside the 2 groups, the first at \[17\]",
    ),
    "g_idx -1": (
        {"g_idx": with_value(np.zeros(128, np.int32), 0, -1)},
        ValueRangeError,
        "outside the 2 groups",
    ),
    "g_idx without groups": (
        {"g_idx": np.zeros(128, np.int32), "group_size": -1},
        ShapeError,
        "group size -1 with g_idx does not fit scale",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_quant_weight_refuses(name):
    changes, error, message = REFUSED[name]
    with pytest.raises(error, match=message) as caught:
        QuantWeight(**parts() | changes)
    assert isinstance(caught.value, MarlinJitError)


B, SCALES = np.zeros((8, 128), np.int32), np.ones((2, 64), np.float16)
MARLIN_REFUSED = {
    "B uint32": ({"B": B.view(np.uint32)}, DTypeError, "B must be int32, got uint32"),
    "B rows": (
        {"B": np.zeros((7, 128), np.int32)},
        ShapeError,
        r"B must have shape \(8, 128\).*got \(7, 128\)",
    ),
    "B columns": (
        {"B": np.zeros((8, 64), np.int32)},
        ShapeError,
        r"B must have shape \(8, 128\).*got \(8, 64\)",
    ),
    "scales float32": (
        {"scales": SCALES.astype(np.float32)},
        DTypeError,
        "scales must be float16 or bfloat16",
    ),
    "scales rows": ({"scales": SCALES[:1]}, ShapeError, r"scales must have shape \(2, 64\)"),
    "scales NaN": (
        {"scales": with_value(SCALES, (1, 2), np.nan)},
        ValueRangeError,
        r"scales: 1 of 128 values NaN or infinite, the first at \[1, 2\]",
    ),
    "delta float16": ({"delta": SCALES}, DTypeError, "delta must be float32, got float16"),
    "delta shape": ({"delta": np.ones((2, 128), np.float32)}, ShapeError, r"delta must have shape \(2, 64\)"),
    "delta infinite": (
        {"delta": np.full((2, 64), np.inf, np.float32)},
        ValueRangeError,
        "128 of 128 values NaN or",
    ),
    "delta too large": (
        {"delta": with_value(np.ones((2, 64), np.float32), (1, 9), -65520)},
        ValueRangeError,
        r"delta \(packed order\): 1 of 128 values too large for float16, the first at \[1, 9\]",
    ),
    "shape one number": ({"shape": (128,)}, ShapeError, "shape must be two integers"),
    "shape no number": ({"shape": 128}, ShapeError, "shape must be two integers"),
    "shape 0": ({"shape": (0, 64)}, ShapeError, "shape must be positive"),
    "shape another": ({"shape": (64, 128)}, ShapeError, "B must have shape"),
    "group 16": ({"group_size": 16}, ShapeError, r"holds group sizes \(32, 64, 128, -1\), not 16"),
    "group 96": ({"shape": (96, 64), "group_size": 64}, ShapeError, "group size 64 does not divide K = 96"),
    "perm int64": ({"perm": np.arange(128)}, DTypeError, "perm must be int32"),
    "perm length": ({"perm": np.arange(64, dtype=np.int32)}, ShapeError, r"perm must have shape \(128,\)"),
    "perm repeats": (
        {"perm": with_value(np.arange(128, dtype=np.int32), 3, 4)},
        ValueRangeError,
        "not those of a permutation of 0..127",
    ),
}


@pytest.mark.parametrize("name", MARLIN_REFUSED)
def test_what_a_marlin_weight_refuses(name):
    changes, error, message = MARLIN_REFUSED[name]
    with pytest.raises(error, match=message) as caught:
        MarlinWeight(**marlin_parts(**changes))
    assert isinstance(caught.value, MarlinJitError)


@pytest.mark.parametrize("largest", [65519, -65519])
def test_the_largest_delta_that_rounds_to_a_finite_one_is_accepted(largest):
    delta = np.full((2, 64), largest, np.float32)
    assert abs(MarlinWeight(**marlin_parts(delta=delta)).delta16[0, 0]) == 65504


def test_from_zero_points():
    arguments = parts()
    del arguments["zero"]
    zero_point = np.random.default_rng(1).integers(0, 17, (2, 64))
    weight = QuantWeight.from_zero_points(**arguments, zero_point=zero_point)
    assert weight.zero.dtype == np.float32
    exact = -zero_point * arguments["scale"].astype(np.float64)
    assert np.array_equal(weight.zero.astype(np.float64), exact)


def test_zero_points_that_are_all_eight_make_a_symmetric_weight():
    arguments = parts()
    del arguments["zero"]
    zero_point = np.full((2, 64), 8, np.uint8)
    assert QuantWeight.from_zero_points(**arguments, zero_point=zero_point).symmetric
    assert not QuantWeight.from_zero_points(
        **arguments, zero_point=with_value(zero_point, (1, 63), 7)
    ).symmetric


@pytest.mark.parametrize(
    ("zero_point", "error", "message"),
    [
        (np.full((2, 64), 8.0), DTypeError, "zero_point must be an integer array, got float64"),
        (np.full((2, 63), 8), ShapeError, r"zero_point must have shape \(2, 64\)"),
        (np.full((2, 64), 17), ValueRangeError, r"zero_point: 128 of 128 values outside 0..16"),
        (np.full((2, 64), 17, np.uint8), ValueRangeError, r"zero_point: 128 of 128 values outside 0..16"),
        (with_value(np.full((2, 64), 8), (1, 1), -1), ValueRangeError, r"1 of 128 .*the first at \[1, 1\]"),
    ],
)
def test_zero_points_refused(zero_point, error, message):
    arguments = parts()
    del arguments["zero"]
    with pytest.raises(error, match=message):
        QuantWeight.from_zero_points(**arguments, zero_point=zero_point)


def test_zero_that_overflows_float32_is_refused():
    scale = np.full((1, 64), 3e38, BF16)
    q, zero_point = np.zeros((64, 64), np.uint8), np.ones((1, 64), np.int32)
    assert QuantWeight.from_zero_points(q, scale, zero_point, 64).zero[0, 0] == -np.float32(scale[0, 0])
    with pytest.raises(ValueRangeError, match="zero: 64 of 64 values NaN or infinite"):
        QuantWeight.from_zero_points(q, scale, zero_point * 15, 64)


def test_delta16_is_delta_rounded_once():
    weight = MarlinWeight(**marlin_parts())
    assert_same_bits(weight.delta16, weight.delta.astype(np.float16))
    assert weight.delta16 is weight.delta16
    assert MarlinWeight(**marlin_parts(delta=None)).delta16 is None


@pytest.mark.parametrize(("dtype", "code_0"), [(FP16, 1024), (BF16, 128)])
def test_points16_are_the_integer_zero_points(rng, dtype, code_0):
    zero_point = rng.integers(0, 17, (2, 70))
    scale = rng.uniform(-1, 1, (2, 70)).astype(np.float32).astype(dtype)
    scale[0, :2] = 0, np.finfo(np.float32).tiny if dtype == BF16 else 6e-8  # nothing; subnormal in float16
    weight = pack(QuantWeight.from_zero_points(random_codes(rng, 128, 70), scale, zero_point, 64))
    assert weight.points16.dtype == dtype
    expected = np.full((2, 128), 8)  # of the pad, and where the scale is 0 and so is the weight
    expected[:, :70] = zero_point
    expected[0, 0] = 8
    assert np.array_equal(weight.points16.astype(np.float64), -(code_0 + layout.permute_scales(expected)))


@pytest.mark.parametrize(
    "change",
    [
        lambda delta, scale: delta + scale / 2,
        lambda delta, scale: np.nextafter(delta, np.float32(np.inf)),
        lambda delta, scale: -9 * scale,  # 17
        lambda delta, scale: 9 * scale,  # -1
    ],
    ids=["a half", "the next float32", "17", "-1"],
)
def test_one_zero_that_is_no_zero_point_leaves_deltas(change):
    scales = np.full((2, 64), 0.37, FP16)
    delta = 3 * scales.astype(np.float32)
    assert MarlinWeight(**marlin_parts(scales=scales, delta=delta)).points16 is not None
    delta[1, 63] = change(delta[1, 63], scales[1, 63].astype(np.float32))
    weight = MarlinWeight(**marlin_parts(scales=scales, delta=delta))
    assert weight.points16 is None
    assert weight.delta16 is not None
    scales[1, 63] = 0  # a constant, which no zero point makes
    assert MarlinWeight(**marlin_parts(scales=scales, delta=delta)).points16 is None
    assert MarlinWeight(**marlin_parts(delta=None)).points16 is None


def test_astype_keeps_integer_zero_points(rng):
    q, zero_point = random_codes(rng, 128, 64), rng.integers(0, 17, (2, 64))
    scale = random_scales(rng, 2, 64)
    bf16 = pack(QuantWeight.from_zero_points(q, scale, zero_point, 64)).astype(BF16)
    expected = QuantWeight.from_zero_points(q, scale.astype(np.float32).astype(BF16), zero_point, 64)
    assert bf16.dtype == BF16
    assert_same_bits(bf16.scales, pack(expected).scales)
    assert_same_bits(bf16.delta, pack(expected).delta, zero_sign=False)


def test_astype_of_the_same_dtype_is_the_weight_itself():
    weight = MarlinWeight(**marlin_parts())
    assert weight.astype("float16") is weight
    with pytest.raises(DTypeError, match="float16 or bfloat16, not float32"):
        weight.astype(np.float32)


def test_astype_that_overflows_is_refused():
    weight = MarlinWeight(B, np.full((2, 64), 1e5, BF16), None, (128, 64), 64)
    with pytest.raises(ValueRangeError, match="scales: 128 of 128 values NaN or infinite"):
        weight.astype(np.float16)


def test_fp16_cache_is_the_dequantized_weight_until_dropped():
    weight = MarlinWeight(**marlin_parts())
    assert weight.fp16_cache is None
    assert weight.cache_fp16() is weight
    cached = weight.fp16_cache
    assert_same_bits(cached, dequantize(weight))
    assert weight.cache_fp16().fp16_cache is cached
    assert dataclasses.replace(weight).fp16_cache is None
    weight.drop_fp16()
    assert weight.fp16_cache is None


def test_arrays_on_the_host_stay_where_they_are():
    assert (weight := QuantWeight(**parts())).to_host() is weight
    assert (packed := pack(weight)).to_host() is packed


@pytest.fixture
def recorded_matmul(monkeypatch):
    """A stand-in for the dispatcher that hands back what it was called with."""
    fake = types.ModuleType("marlin_jit.dispatch")
    fake.matmul = lambda x, w: (x, w)
    monkeypatch.setitem(sys.modules, "marlin_jit.dispatch", fake)


@pytest.mark.usefixtures("recorded_matmul")
@pytest.mark.parametrize("dtype", [np.float16, BF16, object])
@pytest.mark.parametrize("make", BOTH_KINDS)
def test_numpy_leaves_the_matrix_product_to_the_weight(make, dtype):
    weight, x = make(), np.ones((3, 128), dtype)
    given, used = x @ weight
    assert given is x and used is weight


@pytest.mark.usefixtures("recorded_matmul")
@pytest.mark.parametrize("make", BOTH_KINDS)
def test_cupy_leaves_the_matrix_product_to_the_weight(make, no_memory_array):
    weight = make()
    given, used = no_memory_array(0) @ weight
    assert given.shape == (2, 64) and used is weight


@pytest.fixture
def no_memory_array():
    """CuPy arrays that need no GPU: they name a device and an address, and nothing may be read there."""
    cupy = pytest.importorskip("cupy")

    def make(device: int):
        memory = cupy.cuda.UnownedMemory(4096, 1024, None, device)
        return cupy.ndarray((2, 64), np.float16, cupy.cuda.MemoryPointer(memory, 0))

    return make


def test_namespace(no_memory_array):
    import cupy

    host, device = np.ones(3), no_memory_array(0)
    assert namespace(host, None, host) is np
    assert namespace(None, device) is cupy
    with pytest.raises(DTypeError, match="NumPy and CuPy arrays are mixed"):
        namespace(host, device)
    with pytest.raises(DeviceError, match=r"different devices: \[0, 1\]"):
        namespace(device, no_memory_array(1))
    with pytest.raises(DTypeError, match="expected a NumPy or CuPy array, got int"):
        namespace(device, 3)


@pytest.mark.parametrize("spread", [1e-7, 3e-6, 1e-5, 1e-4])
def test_astype_keeps_real_zeros_where_the_scale_underflows(spread: float, rng: np.random.Generator) -> None:
    """Weights near 0.5: the new dtype may lose the scale, never the zero."""
    w = (0.5 + spread * rng.standard_normal((128, 64))).astype(np.float32)
    weight = pack(quantize(w, 64, dtype=ml_dtypes.bfloat16))
    exact = dequantize(weight, np.float32)
    moved = dequantize(weight.astype(np.float16), np.float32)
    assert np.abs(moved - exact).max() <= 8 * 2.0**-24 + 2.0**-10 * np.abs(w - 0.5).max() + 2.0**-20


@pytest.mark.parametrize("point", [0, 3, 8, 15, 16])
def test_astype_scales_integer_zero_points(point: int, rng: np.random.Generator) -> None:
    q = rng.integers(0, 16, (64, 64), dtype=np.uint8)
    scale = rng.uniform(0.001, 0.1, (1, 64)).astype(ml_dtypes.bfloat16)
    points = np.full((1, 64), point, np.uint8)
    weight = pack(QuantWeight.from_zero_points(q, scale, points, -1)).astype(np.float16)
    expected = (q.astype(np.int64) - point) * scale.astype(np.float32).astype(np.float16).astype(np.float64)
    assert np.array_equal(dequantize(weight, np.float32), expected.astype(np.float32))


def test_repr_is_one_short_line(rng):
    q, scale = random_codes(rng, 256, 64), random_scales(rng, 2, 64)
    plain = QuantWeight(q, scale, None, 128)
    assert repr(plain) == "QuantWeight(256 x 64, group size 128, float16, symmetric, host, 16,640 bytes)"
    ordered = QuantWeight(q, scale, None, 128, rng.permutation(256).astype(np.int32) // 128)
    assert "symmetric, activation order, host, 17,664 bytes)" in repr(ordered)
    points = np.full((1, 64), 3, np.uint8)
    packed = pack(QuantWeight.from_zero_points(q, scale[:1].astype(BF16), points, -1))
    expected = "MarlinWeight(256 x 64, one group a column, bfloat16, asymmetric, host, 8,576 bytes"
    assert repr(packed) == expected + ")"
    assert repr(packed.cache_fp16()) == expected + ", FP16 cache)"


def test_repr_names_the_device(no_memory_array, monkeypatch):
    weight = QuantWeight(np.zeros((64, 64), np.uint8), np.ones((1, 64), np.float16), None, -1)
    object.__setattr__(weight, "q", no_memory_array(3))
    assert ", device 3, " in repr(weight)


def test_arguments_of_the_wrong_kind_are_typed_errors() -> None:
    q, scale = np.zeros((32, 8), np.uint8), np.ones((1, 8), np.float16)
    weight = QuantWeight(q, scale, None, 32)
    packed = pack(weight)
    for call in (
        lambda: marlin_jit.pack(packed),
        lambda: marlin_jit.pack(None),
        lambda: marlin_jit.unpack(weight),
        lambda: marlin_jit.quantize(None, 1),
        lambda: marlin_jit.quantize(np.ones((32, 8), np.float32), 32.0),
        lambda: marlin_jit.quantize(np.ones((32, 8), np.float32), 32, dtype="nope"),
        lambda: marlin_jit.quantize(np.ma.masked_greater(np.ones((32, 8), np.float32), 0), 32),
        lambda: marlin_jit.dequantize(weight, "nope"),
        lambda: packed.astype("nope"),
        lambda: marlin_jit.QuantWeight.from_zero_points(q, scale, None, 32),
        lambda: marlin_jit.QuantWeight(np.ma.masked_equal(q, 1), scale, None, 32),
        lambda: marlin_jit.QuantWeight(q.view(np.matrix), scale, None, 32),
    ):
        with pytest.raises(DTypeError):
            call()
