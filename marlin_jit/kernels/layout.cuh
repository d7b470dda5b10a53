// The Marlin layout as kernels read it: the device side of marlin_jit/layout.py, which says why it is so.
#pragma once
#include "ptx.cuh"

// Position of column n in a row of scales or deltas: 64 columns transposed as 8 x 8; with one group a column, the
// 32-wide order.
__device__ __forceinline__ int scale_position(int n, bool one_group) {
    if (one_group) return (n & ~31) + 8 * ((n & 7) >> 1) + 2 * ((n & 31) >> 3) + (n & 1);
    return (n & ~63) + 8 * (n & 7) + ((n & 63) >> 3);
}

// Code q[k, n].
__device__ __forceinline__ int code_at(const uint32_t* b, int padded_n, int k, int n) {
    const int word = 128 * (n >> 6) + 16 * (n & 7) + 4 * ((k & 7) >> 1) + ((n >> 4) & 3);
    const int nibble = 4 * (k & 1) + 2 * ((n >> 3) & 1) + ((k >> 3) & 1);
    return b[static_cast<int64_t>(k >> 4) * (2 * padded_n) + word] >> (4 * nibble) & 15;
}

// Where the correction pair keeps the sum of (row m, group): as A fragments of m16n8k8, 16 rows x 8 groups at a time. Lane
// 4g + t holds (m = g, group 2t), (g + 8, 2t), (g, 2t + 1), (g + 8, 2t + 1).
__device__ __forceinline__ int64_t sum_position(int m, int group, int padded_groups) {
    const int64_t fragment = static_cast<int64_t>(m / 16) * (padded_groups / 8) + group / 8;
    const int lane = m % 8 * 4 + group % 8 / 2;
    return fragment * 128 + lane * 4 + m % 16 / 8 + group % 2 * 2;
}

// What lane group g needs of a chunk's row of 64 scales: for each slab j the pair (n = 16j+g, n = 16j+g+8), packed into
// one register. With several groups the four pairs are one aligned 16-byte vector.
__device__ __forceinline__ void slab_pairs(uint32_t (&pair)[4], const uint16_t* chunk, int g, bool one_group) {
    if (one_group) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int at = scale_position(16 * j + g, true);
            pair[j] = chunk[at] | (static_cast<uint32_t>(chunk[at + 2]) << 16);
        }
    } else {
        const Vec4 v = *reinterpret_cast<const Vec4*>(chunk + 8 * g);
        pair[0] = v.x, pair[1] = v.y, pair[2] = v.z, pair[3] = v.w;
    }
}
