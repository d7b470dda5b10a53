// Scalar access to a weight, for kernels that take one element at a time: W[k, n] = (q - 8) * scale + delta in float32.
//
// Build constant PACKED: 1 = Marlin layout (codes in words, scales and deltas permuted; k counts packed rows),
// 0 = plain arrays (one byte a code; `columns` is N).
#pragma once
#include "layout.cuh"
#include "numeric.cuh"

struct Weight {
    const void* codes;
    const uint16_t* scales;  // [groups, columns]
    const float* delta;      // [groups, columns], or null: symmetric
    const int* group_of;     // [K] where rows are in no order of groups (plain only), or null: k / group_size
    int columns, groups, group_size;

    __device__ __forceinline__ int code(int k, int n) const {
#if PACKED
        return code_at(static_cast<const uint32_t*>(codes), columns, k, n);
#else
        return static_cast<const uint8_t*>(codes)[static_cast<int64_t>(k) * columns + n];
#endif
    }
    __device__ __forceinline__ int group(int k) const { return group_of != nullptr ? group_of[k] : k / group_size; }
    __device__ __forceinline__ int64_t row(int group) const { return static_cast<int64_t>(group) * columns; }
    __device__ __forceinline__ int column(int n) const { return PACKED ? scale_position(n, groups == 1) : n; }

    __device__ __forceinline__ float at(int k, int n) const { return value(code(k, n), k, n); }
    // What the weight at (k, n) is if its code is `q`.
    __device__ __forceinline__ float value(int q, int k, int n) const {
        const int64_t i = row(group(k)) + column(n);
        // The product of a 16-bit float and a code is exact; one rounding at the sum, none if delta is a multiple
        // of scale. No contraction is needed or feared: the product has no rounding to skip.
        const float product = static_cast<float>(q - 8) * Type::to_float(scales[i]);
        return delta != nullptr ? product + delta[i] : product;
    }
};
