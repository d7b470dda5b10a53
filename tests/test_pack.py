"""Packing, unpacking and dequantizing: to the bit what real tools wrote and what exact arithmetic gives."""

from __future__ import annotations

import ast
import inspect
import time
import tracemalloc
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from helpers import assert_same_bits, case_id, cases, random_codes, random_scales
from hypothesis import given, settings
from hypothesis import strategies as st

from marlin_jit import _array, layout
from marlin_jit.errors import DTypeError, ShapeError, ValueRangeError
from marlin_jit.pack import dequantize, pack, unpack
from marlin_jit.quantize import quantize
from marlin_jit.weight import MarlinWeight, QuantWeight

BF16 = ml_dtypes.bfloat16

SYMMETRIC = cases("marlin/orig_*") + cases("marlin/autogptq_*") + cases("vllm_marlin/sym_*")
ZERO_POINTS = cases("vllm_marlin/zp_*")
ACTIVATION_ORDER = cases("vllm_marlin/actorder_*")
AWQ_MARLIN = cases("marlin/awqmarlin_*")


def loaded(case, B="B", scales="s"):
    """What a tool wrote, as it stands in its file."""
    info, tensors = case.info, case.tensors
    return MarlinWeight(tensors[B], tensors[scales], None, (info["K"], info["N"]), info["group_size"])


def random_weight(seed, K, N, group_size, dtype=np.float16, kind="zero points", shuffled=False):
    rng = np.random.default_rng(seed)
    groups = 1 if group_size == -1 else K // group_size
    q, scale = random_codes(rng, K, N), random_scales(rng, groups, N, dtype)
    g_idx = None
    if shuffled:
        g_idx = rng.permutation(np.arange(K) // (K // groups)).astype(np.int32)
    if kind == "zero points":
        return QuantWeight.from_zero_points(q, scale, rng.integers(0, 17, (groups, N)), group_size, g_idx)
    return QuantWeight(q, scale, None, group_size, g_idx)


def exact(qw):
    """W in float64 (24 bits are enough for any sum here), and rounded once to the dtype of the scales."""
    g = np.arange(qw.K) // (qw.K if qw.group_size == -1 else qw.group_size) if qw.g_idx is None else qw.g_idx
    scale = qw.scale.astype(np.float64)
    zero = -8 * scale if qw.zero is None else qw.zero.astype(np.float64)
    return (qw.q * scale[g] + zero[g]).astype(np.float32).astype(qw.dtype)


# --- files of real tools
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", SYMMETRIC, ids=case_id)
def test_symmetric_files(case):
    info, expected = case.info, case.expected
    packed = pack(QuantWeight(expected["codes"], expected["scales"], None, info["group_size"]))
    assert_same_bits(packed.B, case.tensors["B"])
    assert_same_bits(packed.scales, case.tensors["s"])
    assert packed.delta is None and packed.perm is None
    plain = unpack(loaded(case))
    assert_same_bits(plain.q, expected["codes"])
    assert_same_bits(plain.scale, expected["scales"])
    assert_same_bits(dequantize(loaded(case)), expected["W"])


@pytest.mark.parametrize("case", ZERO_POINTS, ids=case_id)
def test_files_with_zero_points(case):
    expected = case.expected
    plain = QuantWeight.from_zero_points(
        expected["codes"], expected["scales"], expected["zeros"], case.info["group_size"]
    )
    packed = pack(plain)
    assert_same_bits(packed.B, case.tensors["B"])
    assert_same_bits(packed.scales, case.tensors["s"])
    assert_same_bits(dequantize(plain), expected["W"])
    assert_same_bits(dequantize(packed), expected["W"])


@pytest.mark.parametrize("case", AWQ_MARLIN, ids=case_id)
def test_files_in_awq_marlin_layout(case):
    """This tool leaves the weight it rounded to, not the codes: they are W/scale."""
    expected = case.expected
    scale = np.repeat(expected["scales"].astype(np.float64), case.info["group_size"], axis=0)
    codes = np.rint(expected["W"] / scale) + 8
    packed = pack(QuantWeight(codes.astype(np.uint8), expected["scales"], None, case.info["group_size"]))
    assert_same_bits(packed.B, case.tensors["qweight"])
    assert_same_bits(packed.scales, case.tensors["scales"])
    assert_same_bits(dequantize(loaded(case, "qweight", "scales")), expected["W"], zero_sign=False)


@pytest.mark.parametrize("case", ACTIVATION_ORDER, ids=case_id)
def test_files_in_activation_order(case):
    info, tensors, expected = case.info, case.tensors, case.expected
    order = tensors["sort_indices"]  # theirs is not a stable sort: rows may stand otherwise within a group
    sorted_rows = QuantWeight(expected["codes"][order], expected["scales"], None, info["group_size"])
    assert_same_bits(pack(sorted_rows).B, tensors["B"])
    theirs = MarlinWeight(
        tensors["B"], tensors["s"], None, (info["K"], info["N"]), info["group_size"], order.astype(np.int32)
    )
    ours = pack(
        QuantWeight(expected["codes"], expected["scales"], None, info["group_size"], expected["g_idx"])
    )
    for packed in (theirs, ours):
        assert_same_bits(dequantize(packed), expected["W"])
        assert_same_bits(unpack(packed).q, expected["codes"])
        assert_same_bits(unpack(packed).g_idx, expected["g_idx"])
    assert np.array_equal(expected["g_idx"][ours.perm], tensors["g_idx_sorted"])
    assert np.all(np.diff(ours.perm)[np.diff(tensors["g_idx_sorted"]) == 0] > 0), (
        "rows of a group keep their order"
    )


# --- exact arithmetic
# ------------------------------------------------------------------------------------------


def scales_of_all_magnitudes(dtype):
    """Every float16 (every eighth bfloat16) whose weights and delta do not overflow, subnormals too."""
    bits = np.arange(0, 1 << 16, 1 if dtype == np.float16 else 8, dtype=np.uint16)
    scale = bits.view(dtype)
    largest = float(np.finfo(dtype).max if dtype == np.float16 else ml_dtypes.finfo(dtype).max)
    with np.errstate(invalid="ignore"):
        return scale[np.abs(scale.astype(np.float64)) * 16 < largest][None]


@pytest.mark.parametrize("dtype", [np.float16, BF16])
@pytest.mark.parametrize("zero_point", range(17))
def test_all_scales_codes_and_zero_points(dtype, zero_point):
    scale = scales_of_all_magnitudes(dtype)
    N = scale.shape[1]
    q = np.repeat(np.arange(16, dtype=np.uint8)[:, None], N, axis=1)
    plain = QuantWeight.from_zero_points(q, scale, np.full((1, N), zero_point), -1)
    # Both factors have few bits: the product is exact in float64 and in float32, so this is one rounding.
    expected = (
        ((q.astype(np.float64) - zero_point) * scale.astype(np.float64)).astype(np.float32).astype(dtype)
    )
    # 0 times a negative scale is -0; a sum that cancels is +0.
    assert_same_bits(dequantize(plain), expected, zero_sign=zero_point == 8)
    assert_same_bits(dequantize(pack(plain)), expected, zero_sign=zero_point == 8)


@pytest.mark.parametrize("dtype", [np.float16, BF16])
def test_real_zeros(dtype, rng):
    q, scale = random_codes(rng, 128, 64), rng.uniform(0.01, 0.1, (2, 64)).astype(np.float32).astype(dtype)
    zero = rng.uniform(-1, 1, (2, 64)).astype(np.float32).astype(dtype)
    plain = QuantWeight(q, scale, zero, 64)
    assert_same_bits(dequantize(plain), exact(plain), zero_sign=False)
    assert_same_bits(dequantize(pack(plain)), exact(plain), zero_sign=False)
    assert np.array_equal(unpack(pack(plain)).zero, zero.astype(np.float32))


def test_dequantize_to_another_dtype(rng):
    plain = QuantWeight(random_codes(rng, 64, 64), random_scales(rng, 1, 64), None, -1)
    wide = (plain.q - 8.0) * plain.scale.astype(np.float64)
    for w in (plain, pack(plain)):
        assert_same_bits(dequantize(w, np.float32), wide.astype(np.float32))
        assert_same_bits(dequantize(w, BF16), wide.astype(np.float32).astype(BF16))
    for refused in (np.float64, np.int8):
        with pytest.raises(DTypeError, match="float16, bfloat16 or float32, not"):
            dequantize(plain, refused)
    with pytest.raises(DTypeError, match="expected a QuantWeight or MarlinWeight, got ndarray"):
        dequantize(plain.q)


@pytest.mark.parametrize("group_size", [1, 5, 48, 240])
def test_dequantize_takes_group_sizes_that_the_format_does_not(group_size):
    plain = random_weight(3, 240, 37, group_size)
    assert_same_bits(dequantize(plain), exact(plain), zero_sign=False)


def test_dequantize_takes_groups_of_unequal_size(rng):
    g_idx = rng.integers(0, 3, 50).astype(np.int32)
    plain = QuantWeight(random_codes(rng, 50, 8), random_scales(rng, 3, 8), None, 20, g_idx)
    assert_same_bits(dequantize(plain), exact(plain), zero_sign=False)


# --- properties
# ------------------------------------------------------------------------------------------------

shapes = st.tuples(st.sampled_from([32, 64, 128, -1]), st.integers(1, 6), st.integers(1, 300))


@settings(deadline=None, max_examples=60)
@given(shapes, st.integers(0, 2**32), st.sampled_from([np.float16, BF16]), st.booleans(), st.booleans())
def test_round_trip(shape, seed, dtype, symmetric, shuffled):
    group_size, multiple, N = shape
    K = multiple * (17 if group_size == -1 else group_size)
    plain = random_weight(
        seed, K, N, group_size, dtype, "symmetric" if symmetric else "zero points", shuffled
    )
    packed = pack(plain)
    assert packed.padded_shape == layout.padded_shape(K, N, plain.group_size)
    back = unpack(packed)
    assert_same_bits(back.q, plain.q)
    assert_same_bits(back.scale, plain.scale)
    assert back.group_size == plain.group_size
    assert (back.zero is None) == (plain.zero is None)
    if plain.zero is not None:
        assert_same_bits(back.zero, plain.zero, zero_sign=False)
    row_groups = np.arange(K) // (K if plain.group_size == -1 else plain.group_size)
    assert np.array_equal(
        row_groups if plain.g_idx is None else plain.g_idx, row_groups if back.g_idx is None else back.g_idx
    )
    assert_same_bits(dequantize(packed), exact(plain), zero_sign=False)


@settings(deadline=None, max_examples=30)
@given(shapes, st.integers(0, 2**32))
def test_each_code_is_where_the_closed_form_says(shape, seed):
    group_size, multiple, N = shape
    K = multiple * (17 if group_size == -1 else group_size)
    plain = random_weight(seed, K, N, group_size)
    row, word, shift = layout.code_position(*np.indices((K, N)))
    assert np.array_equal((pack(plain).B.view(np.uint32)[row, word] >> shift) & 15, plain.q)


@settings(deadline=None, max_examples=30)
@given(shapes, st.integers(0, 2**32))
def test_the_pad_holds_zero_weights(shape, seed):
    group_size, multiple, N = shape
    K = multiple * (17 if group_size == -1 else group_size)
    packed = pack(random_weight(seed, K, N, group_size))
    whole = unpack(replace(packed, shape=packed.padded_shape))
    assert np.all(whole.q[K:] == 8) and np.all(whole.q[:, N:] == 8)
    W = dequantize(replace(packed, shape=packed.padded_shape), np.float32)
    assert np.all(W[:, N:] == 0)
    if packed.group_size == -1 and packed.delta is not None:  # rows that share the only group keep its delta
        delta = layout.permute_scales(packed.delta)
        assert np.array_equal(W[K:], np.repeat(delta, len(W) - K, axis=0))
    else:
        assert np.all(W[K:] == 0)


@pytest.mark.parametrize("chunk", [1, 1 << 12, 1 << 30])
def test_the_size_of_the_chunks_does_not_matter(monkeypatch, chunk):
    plain = random_weight(11, 160, 450, 32, shuffled=True)
    packed = pack(plain)
    monkeypatch.setattr(_array, "_HOST_SCRATCH", chunk)
    again = pack(plain)
    assert_same_bits(again.B, packed.B)
    assert_same_bits(unpack(again).q, plain.q)
    assert_same_bits(dequantize(again), dequantize(plain), zero_sign=False)


@given(st.integers(1, 10**5), st.integers(1, 10**5), st.booleans(), st.integers(1, 16))
def test_column_chunks(rows, columns, device, scratch):
    chunks = list(_array.column_chunks(rows, columns, device, scratch))
    assert chunks[0][0] == 0 and chunks[-1][1] == columns
    assert all(stop == start for (_, stop), (start, _) in pairwise(chunks))
    assert all(start % 64 == 0 for start, _ in chunks)
    bound = max(64 * rows * scratch, rows * columns if device else 1 << 20)
    assert all((stop - start) * rows * scratch <= bound for start, stop in chunks)


# --- what pack() makes of group indices and of what it cannot pack
# ---------------------------------------------


def test_group_index_in_order_needs_no_permutation():
    plain = random_weight(5, 128, 64, 32)
    ordered = replace(plain, g_idx=(np.arange(128) // 32).astype(np.int32))
    assert pack(ordered).perm is None
    assert_same_bits(pack(ordered).B, pack(plain).B)


def test_the_permutation_gathers_activations(rng):
    plain = random_weight(6, 128, 64, 32, shuffled=True)
    packed = pack(plain)
    x = rng.standard_normal((3, 128))
    in_order = dequantize(replace(packed, perm=None)).astype(np.float64)
    expected = x @ exact(plain).astype(np.float64)
    np.testing.assert_allclose(
        x[:, packed.perm] @ in_order, expected, rtol=0, atol=1e-12 * np.abs(expected).max()
    )


@pytest.mark.parametrize("group_size", [1, 16, 48, 256])
def test_group_sizes_that_cannot_be_packed(group_size):
    with pytest.raises(
        ShapeError, match=rf"holds group sizes \(32, 64, 128, -1\), not {group_size}; use the Quant"
    ):
        pack(random_weight(0, 768, 64, group_size))


def test_unequal_groups_cannot_be_packed(rng):
    g_idx = np.repeat(np.arange(4), [32, 33, 31, 32]).astype(np.int32)
    plain = QuantWeight(random_codes(rng, 128, 64), random_scales(rng, 4, 64), None, 32, g_idx)
    with pytest.raises(ShapeError, match="g_idx puts 33 rows in group 1; the Marlin format needs 32"):
        pack(plain)


def test_delta_that_overflows_cannot_be_packed(rng):
    scale = np.full((1, 64), 9000, np.float16)
    plain = QuantWeight.from_zero_points(random_codes(rng, 64, 64), scale, np.zeros((1, 64), np.int32), 64)
    with pytest.raises(ValueRangeError, match="64 of 64 values too large for float16"):
        pack(plain)


def test_weights_beyond_the_dtype_become_infinite(rng):
    plain = QuantWeight(np.full((1, 1), 15, np.uint8), np.full((1, 1), 60000, np.float16), None, -1)
    assert dequantize(plain)[0, 0] == np.inf
    assert dequantize(plain, np.float32)[0, 0] == 7 * 59999 + 7  # float16 holds 60000 exactly


# --- cost
# ------------------------------------------------------------------------------------------------------


def extra_memory(function, argument):
    """Peak bytes allocated during a call, beyond what its result holds."""
    tracemalloc.start()
    result = function(argument)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del result
    return peak - kept


@pytest.mark.parametrize("shape", [(4096, 2048), (2016, 2100)])
@pytest.mark.parametrize("shuffled", [False, True])
def test_extra_memory_is_below_the_codes(shape, shuffled):
    plain = random_weight(1, *shape, 32, shuffled=shuffled)
    packed = pack(plain)
    for name, function, argument in [
        ("pack", pack, plain),
        ("unpack", unpack, packed),
        ("dequantize codes", dequantize, plain),
        ("dequantize packed", dequantize, packed),
        ("quantize", partial(quantize, group_size=32), np.zeros(shape, np.float16)),
    ]:
        assert extra_memory(function, argument) < plain.q.nbytes, name


def test_throughput(capsys):
    """A floor far below what one core does: only a change of kind (a Python loop) falls through it."""
    plain = random_weight(2, 4096, 2048, 128)
    packed = pack(plain)
    rates = {}
    for name, function, argument in [
        ("pack", pack, plain),
        ("unpack", unpack, packed),
        ("dequantize", dequantize, packed),
    ]:
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            function(argument)
            seconds.append(time.perf_counter() - start)
        rates[name] = plain.q.size / min(seconds) / 1e6
    with capsys.disabled():
        print("\nmillion weights/s: " + ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items()))
    assert rates["pack"] > 20 and rates["unpack"] > 20 and rates["dequantize"] > 5


# --- one code for NumPy and CuPy
# -------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["pack", "weight", "quantize", "layout"])
def test_only_functions_that_cupy_has_too(module):
    cupy = pytest.importorskip("cupy")
    tree = ast.parse(inspect.getsource(import_module(f"marlin_jit.{module}")))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "xp"
    }
    assert {name for name in used if not (hasattr(cupy, name) and hasattr(np, name))} == set()
