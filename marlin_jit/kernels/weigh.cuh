// From a word of B and the scales of its columns to an A fragment of weights in the activation type.
//
// Weights are (q - 8) * scale (ZEROS = 0), (q - 8) * scale + delta (1), or (q - z) * scale (2).
#pragma once
#include "numeric.cuh"

// Scales and zeros of COUNT slabs of 16 columns: for each the pair (n = g, n + 8).
template <int COUNT>
struct Scales {
    uint32_t scale[COUNT], delta[COUNT];
    ZeroPoints zero[COUNT];
    __device__ __forceinline__ void set_zeros(const uint32_t (&pairs)[COUNT]) {
#pragma unroll
        for (int j = 0; j < COUNT; j++) delta[j] = pairs[j], zero[j] = zero_points(pairs[j]);
    }
};

// Register R of a slab's weights. Registers 0 and 2 are column n = g, 1 and 3 are n = g + 8.
template <int R, int COUNT>
__device__ __forceinline__ void weigh(uint32_t (&a)[4], uint32_t word, const Scales<COUNT>& s, int j) {
    const uint32_t by = R % 2 ? broadcast_high(s.scale[j]) : broadcast_low(s.scale[j]);
    const uint32_t plus = R % 2 ? broadcast_high(s.delta[j]) : broadcast_low(s.delta[j]);
    if (ZEROS == 0) a[R] = Type::mul(centered<R>(word), by);
    if (ZEROS == 1) a[R] = Type::fma(centered<R>(word), by, plus);
    if (ZEROS == 2) a[R] = Type::mul(shifted<R>(word, s.zero[j]), by);
}
template <int COUNT>
__device__ __forceinline__ void weigh_word(uint32_t (&a)[4], uint32_t word, const Scales<COUNT>& s, int j) {
    weigh<0>(a, word, s, j), weigh<1>(a, word, s, j), weigh<2>(a, word, s, j), weigh<3>(a, word, s, j);
}
