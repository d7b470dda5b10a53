// correction: C[m, n] += sum over g of sums[m, g] * delta[g, n]. Second half of the correction pair.
//
// A product [M, groups] x [groups, N] in float32 would be bound by its multiply-adds, so it runs on tensor cores in tf32:
// delta (16 bits) is exact in tf32, and a float32 sum is cut into two tf32 numbers that keep 21 of its bits.
//
// A block owns 64 columns and 4 / GROUP_WARPS blocks of 16 rows, each worked on by GROUP_WARPS warps that share its
// groups, eight at a time in turn, and add their sums in warp order. Few rows mean few blocks, whose time is that of
// waiting for deltas: there four warps share them. Many rows mean that traffic counts: there a warp takes them all.
//
// Who holds what. Sums are the A operand (16 rows m x 8 groups), deltas B (8 groups x 8 columns). Lane (g = lane / 4,
// t = lane % 4) holds for columns 8h .. 8h+7
//     acc[h][0..3] = (m = g, n = 8h+2t), (same m, n+1), (m+8, n), (m+8, n+1).
// The order of groups within eight is free: lane t takes 2t and 2t + 1. C waits in shared memory, fetched at the start.
//
// Build constants: BF16, GROUP_WARPS (1, 2, 4).
#include "layout.cuh"
#include "numeric.cuh"

constexpr int WARPS = 4;
constexpr int MIN_BLOCKS = GROUP_WARPS > 1 || __CUDA_ARCH__ == 800 ? 5 : 7;  // an SM; sm_80 would spill at 7
constexpr int ROWS = 16, COLUMNS = 64;  // of a warp
constexpr int FRAGMENTS = COLUMNS / 8;
constexpr int ROW_WARPS = WARPS / GROUP_WARPS;
constexpr int OWN = FRAGMENTS / GROUP_WARPS;  // that a warp finishes after the sum over warps
constexpr int PITCH = COLUMNS + 8;            // elements; the odd 16 bytes spread rows over the banks

// A float32 number as two of tf32, which has 10 bits of mantissa: what is cut off the first is exact, and cut in turn.
__device__ __forceinline__ void split_tf32(uint32_t& first, uint32_t& rest, float x) {
    first = __float_as_uint(x) & 0xffffe000;
    rest = __float_as_uint(x - __uint_as_float(first)) & 0xffffe000;
}
// d += a (16 rows m x 8 groups) * b (8 groups x 8 columns n).
__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// acc += sums * deltas for groups first .. first + 7. Sums past the last group are zero, so that any delta will do there.
__device__ __forceinline__ void add_eight(float (&acc)[FRAGMENTS][4], const Float4& sum, const uint16_t* delta, int first,
                                          int groups, int padded_n, int lane) {
    uint32_t pair[2][4];  // deltas of groups 2t and 2t + 1 in columns 16j+g and 16j+g+8
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int64_t row = min(first + lane % 4 * 2 + i, groups - 1);
        slab_pairs(pair[i], delta + row * padded_n, lane / 4, groups == 1);
    }
    const float a[4] = {sum.x, sum.y, sum.z, sum.w};
    uint32_t part[2][4];
#pragma unroll
    for (int i = 0; i < 4; i++) split_tf32(part[0][i], part[1][i], a[i]);
#pragma unroll
    for (int h = 0; h < FRAGMENTS; h++) {
        uint32_t b[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            b[i] = __float_as_uint(Type::to_float(pair[i][h / 2] >> (16 * (h % 2)) & 0xffff));
        mma_tf32(acc[h], part[1], b[0], b[1]);
        mma_tf32(acc[h], part[0], b[0], b[1]);
    }
}

// A tile of C between global and shared memory, eight columns a thread at a time, by the warps that share it.
template <bool STORE>
__device__ __forceinline__ void move_c(uint16_t* c, int64_t ldc, uint16_t (&tile)[ROWS][PITCH], int rows, int columns,
                                       int thread) {
    const bool aligned = ((reinterpret_cast<uint64_t>(c) | (ldc * 2)) & 15) == 0;
    constexpr int ROWS_AT_ONCE = 32 * GROUP_WARPS / FRAGMENTS;
#pragma unroll
    for (int i = 0; i < ROWS / ROWS_AT_ONCE; i++) {
        const int row = i * ROWS_AT_ONCE + thread / FRAGMENTS, column = thread % FRAGMENTS * 8;
        const int count = row < rows ? max(0, min(8, columns - column)) : 0;
        uint16_t *global = c + row * ldc + column, *shared = &tile[row][column];
        if (aligned && count == 8) {
            if (STORE)
                *reinterpret_cast<Vec4*>(global) = *reinterpret_cast<const Vec4*>(shared);
            else
                copy_async16(shared_address(shared), global, 16);
        } else {
#pragma unroll 1
            for (int j = 0; j < count; j++) {
                if (STORE)
                    global[j] = shared[j];
                else
                    shared[j] = global[j];
            }
        }
    }
}

__device__ __forceinline__ void add_to_pair(uint16_t* at, float low, float high) {
    uint32_t& pair = *reinterpret_cast<uint32_t*>(at);
    pair = Type::pair(Type::to_float(pair & 0xffff) + low, Type::to_float(pair >> 16) + high);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS)
    correction(const Float4* sums,  // A fragments, as group_sums.cu leaves them
               const uint16_t* delta, uint16_t* c, int64_t ldc, int m, int n, int padded_n, int groups, int padded_groups) {
    wait_for_previous_grid();
    __shared__ __align__(16) uint16_t tiles[ROW_WARPS][ROWS][PITCH];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int row_warp = warp / GROUP_WARPS, group_warp = warp % GROUP_WARPS, in_tile = 32 * group_warp + lane;
    const int n0 = blockIdx.x * COLUMNS, m0 = (blockIdx.y * ROW_WARPS + row_warp) * ROWS;
    uint16_t* corner = c + m0 * ldc + n0;
    auto& tile = tiles[row_warp];
    move_c<false>(corner, ldc, tile, m - m0, n - n0, in_tile);
    copy_commit();

    float acc[FRAGMENTS][4] = {};
    const int row_block = min(m0, m - 1) / ROWS;  // past M any sums will do: those rows are never stored
    const Float4* sum = sums + (static_cast<int64_t>(row_block) * (padded_groups / 8) + group_warp) * 32 + lane;
#pragma unroll 1
    for (int group = 8 * group_warp; group < padded_groups; group += 8 * GROUP_WARPS, sum += 32 * GROUP_WARPS)
        add_eight(acc, *sum, delta + n0, group, groups, padded_n, lane);

    copy_wait<0>();
    float own[OWN][4];
    if constexpr (GROUP_WARPS > 1) {
        __shared__ Float4 exchange[WARPS][FRAGMENTS][32];
#pragma unroll
        for (int h = 0; h < FRAGMENTS; h++) exchange[warp][h][lane] = {acc[h][0], acc[h][1], acc[h][2], acc[h][3]};
        __syncthreads();
#pragma unroll
        for (int h = 0; h < OWN; h++) {
            Float4 sum = {0, 0, 0, 0};
#pragma unroll
            for (int w = 0; w < GROUP_WARPS; w++) {
                const Float4 v = exchange[row_warp * GROUP_WARPS + w][group_warp * OWN + h][lane];
                sum = {sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w};
            }
            own[h][0] = sum.x, own[h][1] = sum.y, own[h][2] = sum.z, own[h][3] = sum.w;
        }
    } else {
        __syncwarp();
#pragma unroll
        for (int h = 0; h < OWN; h++)
#pragma unroll
            for (int i = 0; i < 4; i++) own[h][i] = acc[h][i];
    }

    uint16_t* mine = &tile[g][8 * OWN * group_warp + 2 * t];
#pragma unroll
    for (int h = 0; h < OWN; h++) {
        add_to_pair(mine + 8 * h, own[h][0], own[h][1]);
        add_to_pair(mine + 8 * h + 8 * PITCH, own[h][2], own[h][3]);
    }
    if (GROUP_WARPS > 1)
        __syncthreads();
    else
        __syncwarp();
    move_c<true>(corner, ldc, tile, m - m0, n - n0, in_tile);
}
