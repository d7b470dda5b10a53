"""The closed form of the layout, against the definition of the tensor-core fragment that it serves."""

from __future__ import annotations

from math import lcm

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlin_jit import layout


def fragment_table(columns: int) -> dict[tuple[int, int], tuple[int, int]]:
    """(k, n) -> (word, nibble) for 16 rows, told from the kernel's side.

    A lane of mma.m16n8k16 (g = lane/4, t = lane%4) holds four registers of its A operand, two values each,
    the even k in the low half: a0 (row g; k 2t, 2t+1), a1 (row g+8; same k), a2 (row g; k 2t+8, 2t+9), a3
    (row g+8; the same). The rows are columns n of the weight. A kernel gets them from one word q by masks:
    lo(x) keeps bits 0-3 and 16-19, hi(x) bits 4-7 and 20-23, and a0 = lo(q), a1 = lo(q >> 8), a2 = hi(q), a3
    = hi(q >> 8).
    """
    masked_bits = {"a0": (0, 16), "a1": (8, 24), "a2": (4, 20), "a3": (12, 28)}
    table = {}
    for chunk in range(columns // 64):
        for lane in range(32):
            g, t = divmod(lane, 4)
            registers = {
                "a0": (g, 2 * t),
                "a1": (g + 8, 2 * t),
                "a2": (g, 2 * t + 8),
                "a3": (g + 8, 2 * t + 8),
            }
            for tile in range(4):  # one 16-byte load a lane: four words, one for each 16 columns of the chunk
                word = (chunk * 32 + lane) * 4 + tile
                for name, (row, k) in registers.items():
                    for half in range(2):
                        table[k + half, 64 * chunk + 16 * tile + row] = (word, masked_bits[name][half])
    return table


def test_position_serves_the_fragment():
    table = fragment_table(192)
    assert len(table) == 16 * 192
    for (k, n), (word, bit) in table.items():
        assert layout.code_position(k, n) == (0, word, bit)
        assert layout.code_position(k + 48, n) == (3, word, bit)


def test_positions_are_all_different_and_fill_every_word():
    k, n = np.mgrid[0:64, 0:192]
    row, word, shift = layout.code_position(k, n)
    places = np.unique(np.stack([row, word, shift], -1).reshape(-1, 3), axis=0)
    assert len(places) == 64 * 192
    assert places.min(0).tolist() == [0, 0, 0]
    assert places.max(0).tolist() == [3, 2 * 192 - 1, 28]


def test_word_order_is_the_same_rule_as_the_position(rng):
    """One byte at a time, moved by the array form and looked up by the closed form."""
    pairs = rng.integers(0, 256, (3, 8, 128), dtype=np.uint8)
    B = np.empty((3, 256), np.int32)
    layout.word_bytes(B)[...] = layout.word_order(pairs)
    tile, i, n = np.mgrid[0:3, 0:8, 0:128]
    row, word, shift = layout.code_position(16 * tile + i, n)
    later_row, later_word, later_shift = layout.code_position(16 * tile + 8 + i, n)
    assert np.array_equal(row, later_row) and np.array_equal(word, later_word)
    assert np.array_equal(later_shift, shift + 4)
    assert np.array_equal((B.view(np.uint32)[row, word] >> shift) & 255, pairs[tile, i, n])


@pytest.mark.parametrize("shape", [(1, 8, 64), (3, 8, 192), (5, 8, 1024)])
def test_the_quick_copy_is_the_plain_one(shape, rng):
    pairs = rng.integers(0, 256, shape, dtype=np.uint8)
    tiles, _, columns = shape
    plain = np.empty((tiles, 2 * columns), np.int32)
    layout.word_bytes(plain)[...] = layout.word_order(pairs)
    quick = np.full((tiles, 2 * columns), -1, np.int32)
    layout.copy_in_word_order(quick, pairs)
    assert np.array_equal(quick, plain)


@pytest.mark.parametrize("groups", [2, 3])
def test_scales_of_several_groups(groups):
    scales = np.arange(groups * 128).reshape(groups, 128)
    permuted = layout.permute_scales(scales)
    for chunk in range(2):
        for p in range(64):
            assert permuted[-1, 64 * chunk + p] == scales[-1, 64 * chunk + 8 * (p % 8) + p // 8]
    assert np.array_equal(layout.permute_scales(permuted), scales)


def test_scales_of_a_single_group():
    scales = np.arange(128).reshape(1, 128)
    permuted = layout.permute_scales(scales)
    for block in range(4):
        for n in range(32):  # column n lies at 8*((n & 7) >> 1) + 2*(n >> 3) + (n & 1)
            assert permuted[0, 32 * block + 8 * ((n & 7) >> 1) + 2 * (n >> 3) + (n & 1)] == 32 * block + n
    assert np.array_equal(layout.permute_scales(permuted), scales)


def test_one_lane_reads_its_scales_in_one_piece():
    """What the order is for: the eight values from 64*chunk + 8*g are columns g, g + 8, ... of the chunk."""
    permuted = layout.permute_scales(np.tile(np.arange(64), (2, 1)))
    for g in range(8):
        assert permuted[1, 8 * g : 8 * g + 8].tolist() == [g + 8 * i for i in range(8)]


@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([32, 64, 128, -1]))
def test_padded_shape_is_the_smallest(K, N, group_size):
    Kp, Np = layout.padded_shape(K, N, group_size)
    step = 64 if group_size == -1 else lcm(64, group_size)
    assert Kp % step == 0 and Kp - step < K <= Kp
    assert Np % 64 == 0 and Np - 64 < N <= Np
