// correction: C[m, n] += sum over g of sums[m, g] * delta[g, n]. Second half of the correction pair.
//
// A product [M, groups] x [groups, N] in float32 would be bound by its multiply-adds, so it runs on tensor cores in tf32:
// delta (16 bits) is exact in tf32, and a float32 sum is split into two tf32 numbers that keep 22 of its bits.
//
// A block owns 64 columns and four blocks of eight rows. Its four warps share the groups, eight at a time in turn, since
// the time is that of waiting for deltas; they add their sums through shared memory in warp order, and warp w finishes
// row block w, whose part of C it has fetched at the start.
//
// As in marlin.cu the product is transposed, but which column a fragment row stands for is free, and chosen so that a
// lane meets C in 16-byte pieces: row r of half-slab h (of eight: half-slab h holds rows 8h .. 8h+7) is column
//     n = 32 * (h / 4) + 8 * (r / 2) + 2 * (h % 4) + r % 2.
// movmatrix turns a half-slab's (n, m) fragment into lane (g, t) = (row m = g, columns of r = 2t, 2t + 1), so that half-slabs
// 4b .. 4b+3 together are the eight columns 32b + 8t .. + 7. Turning is exact on 16-bit elements: C is turned in, summed in
// float32, rounded once, and turned back. The order of groups within eight is free too: lane t takes 2t and 2t + 1.
#include "layout.cuh"
#include "numeric.cuh"

constexpr int WARPS = 4;
constexpr int ROW_BLOCKS = WARPS;

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
    __shared__ Float4 exchange[WARPS][ROW_BLOCKS][4][32];  // [from warp][row block][slab][lane]
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int n0 = blockIdx.x * 64, m0 = blockIdx.y * ROW_BLOCKS * 8;

    // This lane's two pieces of C.
    const bool aligned = ((reinterpret_cast<uint64_t>(c) | (ldc * 2)) & 15) == 0;
    const int own_row = m0 + 8 * warp + g;
    uint32_t piece[2][4] = {};
    int count[2];
#pragma unroll
    for (int b = 0; b < 2; b++) {
        const int column = n0 + 32 * b + 8 * t;
        const uint16_t* from = c + own_row * ldc + column;
        count[b] = own_row < m ? max(0, min(8, n - column)) : 0;
        if (aligned && count[b] == 8) {
            const Vec4 v = *reinterpret_cast<const Vec4*>(from);
            piece[b][0] = v.x, piece[b][1] = v.y, piece[b][2] = v.z, piece[b][3] = v.w;
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (i < count[b]) piece[b][i / 2] |= static_cast<uint32_t>(from[i]) << (16 * (i % 2));
        }
    }

    // Where this lane's row of each half-slab lies in a row of deltas.
    int at[8];
#pragma unroll
    for (int h = 0; h < 8; h++) at[h] = scale_position(n0 + 32 * (h / 4) + 8 * (g / 2) + 2 * (h % 4) + g % 2, groups == 1);

    float acc[4][ROW_BLOCKS][4] = {};  // [slab of half-slabs 2j, 2j + 1][row block][fragment]
    for (int group = 8 * warp; group < groups; group += 8 * WARPS) {
        const int of[2] = {group + 2 * t, group + 2 * t + 1};
        uint32_t a[4][4];
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int h = 0; h < 8; h++) {
                const uint16_t* row = delta + static_cast<int64_t>(of[i]) * padded_n;
                a[h / 2][h % 2 + 2 * i] = of[i] < groups ? __float_as_uint(Type::to_float(row[at[h]])) : 0;
            }
#pragma unroll
        for (int mb = 0; mb < ROW_BLOCKS; mb++) {
            const int row = m0 + 8 * mb + g;
            uint32_t first[2], rest[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float sum = row < m && of[i] < groups ? sums[static_cast<int64_t>(row) * groups + of[i]] : 0.f;
                first[i] = to_tf32(sum);
                rest[i] = to_tf32(sum - __uint_as_float(first[i]));
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                mma_tf32(acc[j][mb], a[j], rest[0], rest[1]);
                mma_tf32(acc[j][mb], a[j], first[0], first[1]);
            }
        }
    }

#pragma unroll
    for (int mb = 0; mb < ROW_BLOCKS; mb++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            exchange[warp][mb][j][lane] = {acc[j][mb][0], acc[j][mb][1], acc[j][mb][2], acc[j][mb][3]};
    __syncthreads();
    float total[4][4] = {};
#pragma unroll
    for (int from = 0; from < WARPS; from++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const Float4 v = exchange[from][warp][j][lane];
            total[j][0] += v.x, total[j][1] += v.y, total[j][2] += v.z, total[j][3] += v.w;
        }

#pragma unroll
    for (int b = 0; b < 2; b++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int h = 4 * b + i;
            const float* sum = total[h / 2] + h % 2 * 2;
            const uint32_t turned = transpose8x8(piece[b][i]);  // (n = row g of half-slab h; m = 2t, 2t + 1)
            piece[b][i] = transpose8x8(Type::pair(Type::to_float(turned & 0xffff) + sum[0],
                                                  Type::to_float(turned >> 16) + sum[1]));
        }
        uint16_t* to = c + own_row * ldc + n0 + 32 * b + 8 * t;
        if (aligned && count[b] == 8) {
            *reinterpret_cast<Vec4*>(to) = {piece[b][0], piece[b][1], piece[b][2], piece[b][3]};
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (i < count[b]) to[i] = piece[b][i / 2] >> (16 * (i % 2)) & 0xffff;
        }
    }
}
