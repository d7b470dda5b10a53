// correction: C[m, n] += sum over g of sums[m, g] * delta[g, n]. Second half of the correction pair.
//
// A product [M, groups] x [groups, N] in float32 would be bound by its multiply-adds, so it runs on tensor cores in tf32:
// delta (16 bits) is exact in tf32, and a float32 sum is split into two tf32 numbers that keep 22 of its bits.
//
// A warp owns one chunk of 64 columns and 32 rows. As in marlin.cu the product is transposed: lane (g, t) holds for
// slab j and row block mb C at (n = 16j+g, m = 8mb+2t), (same n, m+1), (n+8, m), (n+8, m+1). C itself is read and
// written as pairs along n and turned into that order by movmatrix, which is exact on 16-bit elements; each output is
// rounded once here, after the GEMM's own rounding.
#include "layout.cuh"
#include "numeric.cuh"

constexpr int ROW_BLOCKS = 4;
constexpr int WARPS = 4;

__device__ __forceinline__ uint32_t to_tf32(float x) {
    uint32_t y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}
// d += a (16 columns n x 8 groups) * b (8 groups x 8 rows m).
__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    correction(const float* sums, const uint16_t* delta, uint16_t* c, int64_t ldc, int m, int n, int padded_n,
               int groups) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int n0 = (blockIdx.x * WARPS + threadIdx.x / 32) * 64, m0 = blockIdx.y * ROW_BLOCKS * 8;
    if (n0 >= n) return;

    float acc[4][ROW_BLOCKS][4] = {};
    for (int group = 0; group < groups; group += 8) {
        uint32_t low[4] = {}, high[4] = {};  // delta of groups t and t + 4, a pair (n, n + 8) a slab
        if (group + t < groups)
            slab_pairs(low, delta + static_cast<int64_t>(group + t) * padded_n + n0, g, groups == 1);
        if (group + t + 4 < groups)
            slab_pairs(high, delta + static_cast<int64_t>(group + t + 4) * padded_n + n0, g, groups == 1);
        uint32_t a[4][4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            a[j][0] = __float_as_uint(Type::to_float(low[j] & 0xffff));
            a[j][1] = __float_as_uint(Type::to_float(low[j] >> 16));
            a[j][2] = __float_as_uint(Type::to_float(high[j] & 0xffff));
            a[j][3] = __float_as_uint(Type::to_float(high[j] >> 16));
        }
#pragma unroll
        for (int mb = 0; mb < ROW_BLOCKS; mb++) {
            const int row = m0 + 8 * mb + g;
            float b[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int of = group + t + 4 * i;
                b[i] = row < m && of < groups ? sums[static_cast<int64_t>(row) * groups + of] : 0.f;
            }
            const uint32_t first[2] = {to_tf32(b[0]), to_tf32(b[1])};
            const uint32_t rest[2] = {to_tf32(b[0] - __uint_as_float(first[0])),
                                      to_tf32(b[1] - __uint_as_float(first[1]))};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                mma_tf32(acc[j][mb], a[j], rest[0], rest[1]);
                mma_tf32(acc[j][mb], a[j], first[0], first[1]);
            }
        }
    }

    const bool paired = ((reinterpret_cast<uint64_t>(c) | (ldc * 2)) & 3) == 0;
#pragma unroll
    for (int mb = 0; mb < ROW_BLOCKS; mb++) {
        const int row = m0 + 8 * mb + g;
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int column = n0 + 16 * j + 8 * half + 2 * t;
                uint16_t* at = c + row * ldc + column;
                const bool inside = row < m && column < n;
                const bool both = inside && column + 1 < n;
                uint32_t pair = 0;
                if (both && paired)
                    pair = *reinterpret_cast<const uint32_t*>(at);
                else if (inside)
                    pair = at[0] | (both ? static_cast<uint32_t>(at[1]) << 16 : 0);
                const uint32_t turned = transpose8x8(pair);
                const float sum0 = Type::to_float(turned & 0xffff) + acc[j][mb][2 * half];
                const float sum1 = Type::to_float(turned >> 16) + acc[j][mb][2 * half + 1];
                pair = transpose8x8(Type::pair(sum0, sum1));
                if (both && paired) {
                    *reinterpret_cast<uint32_t*>(at) = pair;
                } else if (inside) {
                    at[0] = pair & 0xffff;
                    if (both) at[1] = pair >> 16;
                }
            }
    }
}
