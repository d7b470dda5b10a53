// Cross-iteration rounding: which code a weight has in an iteration. marlin_jit/rounding.py has the same as array
// operations, and says why it is done so.
//
// From the host: `seed_key` = mix(seed), `phase` = the iteration's last four bits in reverse. A column's key is
// mix(n ^ seed_key). All arithmetic is that of unsigned 32-bit integers, so every side gets the same bits.
#pragma once
#include "ptx.cuh"

// lowbias32 of Chris Wellons' hash-prospector (public domain).
__device__ __forceinline__ uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7feb352d;
    x ^= x >> 15;
    x *= 0x846ca68b;
    x ^= x >> 16;
    return x;
}

// 0..15: an iteration's threshold at row k of a column.
__device__ __forceinline__ int threshold(int k, uint32_t column_key, int phase) {
    return (mix(k ^ column_key) >> 28) ^ phase;
}

// `frac4` is a fraction in sixteenths, from 8 on above the code below q; the upper code is taken so many times in 16.
__device__ __forceinline__ int frac4_code(int q, int frac4, int at) {
    const int lower = frac4 < 8 ? q : q - 1;
    const int code = at < frac4 ? lower + 1 : lower;
    return min(max(code, 0), 15);
}

// One step down where `sign_bit` is set and up where it is not, 4 times in 16.
__device__ __forceinline__ int sign_bit_code(int q, int sign_bit, int at) {
    const int moved = sign_bit ? q - 1 : q + 1;
    const int code = at < 4 ? moved : q;
    return min(max(code, 0), 15);
}
