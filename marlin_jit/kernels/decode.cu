// marlin_decode: C[M, N] = A[M, K] @ W[K, N] (+ bias) for M <= 8, bound by reading W once. `gated` as in marlin.cu.
//
// What is computed. The same transposed product and fragments as marlin.cu, but scales act on float32 sums: within a
// group the mma adds exact integers q - 8 (or q - z, z an integer zero point) times A, then acc += scale * sum. A real
// zero adds delta * group sum of A, which one more mma with an all-ones fragment delivers. Weights are never rounded.
//
// Who holds what. A warp takes one chunk of 64 columns and a contiguous run of k in blocks of 128. Each lane's share of
// a block is eight 16-byte vectors of B, loaded straight into registers; each is reloaded for the next block as soon
// as it has been used, so nothing but the first block is ever waited for, and there is no barrier in the loop. The
// block's activations and scales lie in a small buffer of the warp's own in shared memory, two blocks deep.
//
// How work is cut. A thread block is CHUNKS columns of warps times K_WARPS shares of k; gridDim.y blocks split k
// further. Sums over warps go through shared memory, sums over blocks through `partials`, both in a fixed order; the
// block that arrives last adds and leaves the counter at zero.
//
// Build constants: BF16, CHUNKS, K_WARPS, GROUP (32, 64, 128; 0 = one group a column), ZEROS (0 = symmetric, 1 = deltas,
// 2 = zero points), MIN_BLOCKS.
#include "layout.cuh"
#include "numeric.cuh"

constexpr int THREADS = 32 * CHUNKS * K_WARPS;
constexpr int BLOCK_K = 128;
constexpr int STEPS = BLOCK_K / 16;
constexpr int ROWS = 8;
constexpr int SCALE_ROWS = GROUP == 0 ? 0 : BLOCK_K / (GROUP == 0 ? 1 : GROUP);
constexpr int GROUP_STEPS = GROUP == 0 ? STEPS : GROUP / 16;

constexpr int A_PITCH = BLOCK_K * 2 + 16;  // bytes; the odd 16 spread the rows of an ldmatrix over the banks
constexpr int S_AT = ROWS * A_PITCH;  // one 128-byte row of the chunk's 64 scales a group, then the same of zeros
constexpr int Z_AT = S_AT + SCALE_ROWS * 128;
constexpr int BUFFER = Z_AT + (ZEROS ? SCALE_ROWS * 128 : 0);
constexpr int SUM_PITCH = 68;  // floats; lanes of a fragment (row 2t, column g) then meet no bank twice

// Keeps the old value where the predicate is false.
__device__ __forceinline__ void load_stream16_if(Vec4& v, const void* from, bool wanted) {
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.b32 p, %5, 0;\n"
        " @p ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];\n}"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(from), "r"(static_cast<int>(wanted)));
}

struct Problem {
    const uint16_t* a;
    int64_t lda;
    const uint16_t *scales, *zeros;  // as in marlin.cu
    int m, k, padded_n, groups;
};

// One lane's share of the copies of a k-block into its warp's buffer: activations (two rows of 256 bytes a pass; rows
// from M on were zeroed once, k from K on, K rounded up to 8, arrives as zeros), then scales and zeros (eight lanes a
// row; rows past the last group meet zero activations, so any finite one will do). Addresses are made anew from the
// block's number: registers are scarcer here than instructions.
__device__ __forceinline__ void load_block(uint32_t buffer, const Problem& p, int chunk, int block) {
    const int lane = threadIdx.x % 32, row = lane / 16, k = block * BLOCK_K + lane % 16 * 8;
    const uint16_t* from = p.a + row * p.lda + k;
    const uint32_t to = buffer + row * A_PITCH + lane % 16 * 16;
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++)
        if (2 * i + row < p.m) copy_async16_l1(to + i * (2 * A_PITCH), from + i * (2 * p.lda), k < p.k ? 16 : 0);
    if (SCALE_ROWS > 0 && lane < SCALE_ROWS * 8) {
        const int group = min(block * SCALE_ROWS + lane / 8, p.groups - 1);
        const int64_t at = static_cast<int64_t>(group) * p.padded_n + chunk * 64 + lane % 8 * 8;
        copy_async16(buffer + S_AT + lane * 16, p.scales + at, 16);
        if (ZEROS) copy_async16(buffer + Z_AT + lane * 16, p.zeros + at, 16);
    }
    copy_commit();
}

using Sums = float[4][4];  // [slab j][fragment], as in marlin.cu

__device__ __forceinline__ void add_scaled(Sums& acc, const Sums& sum, const uint32_t (&pair)[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float low = Type::to_float(pair[j] & 0xffff), high = Type::to_float(pair[j] >> 16);
        acc[j][0] += low * sum[j][0], acc[j][1] += low * sum[j][1];
        acc[j][2] += high * sum[j][2], acc[j][3] += high * sum[j][3];
    }
}
__device__ __forceinline__ void add_correction(Sums& acc, const float (&a_sum)[4], const uint32_t (&pair)[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float low = Type::to_float(pair[j] & 0xffff), high = Type::to_float(pair[j] >> 16);
        acc[j][0] += low * a_sum[0], acc[j][1] += low * a_sum[1];
        acc[j][2] += high * a_sum[0], acc[j][3] += high * a_sum[1];
    }
}
__device__ __forceinline__ void add(Float4& sum, const Float4& v) {
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
}

// Columns column .. column + 3 of a row of C, where they exist.
__device__ __forceinline__ void store(Float4 sum, const uint16_t* bias, uint16_t* row, int column, int n) {
    float v[4] = {sum.x, sum.y, sum.z, sum.w};
    if (bias != nullptr) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (column + i < n) v[i] += Type::to_float(bias[column + i]);
    }
    uint16_t* to = row + column;
    if (column + 4 <= n && reinterpret_cast<uint64_t>(to) % 8 == 0) {
        *reinterpret_cast<uint64_t*>(to) = Type::pair(v[0], v[1]) | static_cast<uint64_t>(Type::pair(v[2], v[3])) << 32;
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (column + i < n) to[i] = Type::from_float(v[i]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    marlin_decode(const uint16_t* a, int64_t lda, const uint32_t* b, const uint16_t* scales, const uint16_t* zeros,
                  const uint16_t* bias, uint16_t* c, int64_t ldc, int m, int n, int k, int padded_n, int padded_k,
                  int gated, Float4* partials, uint32_t* counters) {
    extern __shared__ __align__(128) uint8_t smem[];
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warp = threadIdx.x / 32, chunk_in_block = warp % CHUNKS, k_warp = warp / CHUNKS;
    const int chunk = blockIdx.x * CHUNKS + chunk_in_block;
    const int blocks = (padded_k + BLOCK_K - 1) / BLOCK_K;
    const int workers = gridDim.y * K_WARPS, worker = blockIdx.y * K_WARPS + k_warp;
    const int share = blocks / workers, extra = blocks % workers;
    const int first = worker * share + min(worker, extra);
    const int last = chunk * 64 < padded_n ? first + share + (worker < extra ? 1 : 0) : first;

    const uint32_t mine = shared_address(smem) + warp * (2 * BUFFER);
    const uint32_t row_bytes = 8 * padded_n;  // of one k16 of W
    const uint8_t* next_w = reinterpret_cast<const uint8_t*>(b + chunk * 128 + lane * 4) + static_cast<int64_t>(first) * STEPS * row_bytes;
    const Problem p = {a, lda, scales, zeros, m, k, padded_n, GROUP == 0 ? 1 : padded_k / (GROUP == 0 ? 1 : GROUP)};

    Sums acc = {};
    float a_sum[4] = {};
    if (first >= last) {
        wait_for_previous_grid();
    } else {
        Vec4 w[STEPS] = {};
#pragma unroll
        for (int i = 0; i < STEPS; i++, next_w += row_bytes)
            // A last block of 64 k has no upper half.
            load_stream16_if(w[i], next_w, i < STEPS / 2 || !(padded_k % BLOCK_K != 0 && first + 1 == blocks));
        wait_for_previous_grid();
        load_block(mine, p, chunk, first);
        for (int i = lane; i < 2 * ROWS * (A_PITCH / 16); i += 32) {
            const int row = i / (A_PITCH / 16) % ROWS, at = i % (ROWS * (A_PITCH / 16)) * 16;
            uint8_t* to = smem + (2 * warp + i / (ROWS * (A_PITCH / 16))) * BUFFER + at;
            if (row >= m) *reinterpret_cast<Vec4*>(to) = {0, 0, 0, 0};
        }

        uint32_t here = mine;
        Sums sum = {};
        ZeroPoints points[4];
        if (GROUP == 0 && ZEROS == 2) {
            uint32_t pair[4];
            slab_pairs(pair, zeros + chunk * 64, g, true);
#pragma unroll
            for (int j = 0; j < 4; j++) points[j] = zero_points(pair[j]);
        }
        for (int block = first; block < last; block++) {
            const bool more = block + 1 < last;
            __syncwarp();  // everybody has left the buffer that is filled next
            if (more)
                load_block(2 * mine + BUFFER - here, p, chunk, block + 1);
            else
                copy_commit();
            const bool more_upper = more && !(padded_k % BLOCK_K != 0 && block + 2 == blocks);
            copy_wait<1>();
            __syncwarp();
            const uint32_t from = here + (lane & 7) * A_PITCH + (lane >> 3) * 16;
#pragma unroll
            for (int step = 0; step < STEPS; step += 2) {
                if (GROUP != 0 && ZEROS == 2 && step % GROUP_STEPS == 0) {
                    uint32_t pair[4];
                    load_shared16(pair, here + Z_AT + step / GROUP_STEPS * 128 + g * 16);
#pragma unroll
                    for (int j = 0; j < 4; j++) points[j] = zero_points(pair[j]);
                }
                uint32_t f[4];  // {b0, b1} of step, {b0, b1} of step + 1
                load_matrix4(f, from + step * 32);
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const uint32_t q[4] = {w[step + e].x, w[step + e].y, w[step + e].z, w[step + e].w};
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        uint32_t codes[4];
                        if (ZEROS == 2)
                            shifted(codes, q[j], points[j]);
                        else
                            centered(codes, q[j]);
                        Type::mma(sum[j], codes, f[2 * e], f[2 * e + 1]);
                    }
                    load_stream16_if(w[step + e], next_w, step < STEPS / 2 ? more : more_upper);
                    next_w += row_bytes;
                    if (ZEROS == 1) {
                        const uint32_t ones[4] = {Type::ONES, Type::ONES, Type::ONES, Type::ONES};
                        Type::mma(a_sum, ones, f[2 * e], f[2 * e + 1]);
                    }
                }
                if (GROUP != 0 && (step + 2) % GROUP_STEPS == 0) {
                    uint32_t pair[4];
                    load_shared16(pair, here + S_AT + step / GROUP_STEPS * 128 + g * 16);
                    add_scaled(acc, sum, pair);
#pragma unroll
                    for (int i = 0; i < 16; i++) (&sum[0][0])[i] = 0.f;
                    if (ZEROS == 1) {
                        load_shared16(pair, here + Z_AT + step / GROUP_STEPS * 128 + g * 16);
                        add_correction(acc, a_sum, pair);
#pragma unroll
                        for (int i = 0; i < 4; i++) a_sum[i] = 0.f;
                    }
                }
            }
            here = 2 * mine + BUFFER - here;
        }
        if (GROUP == 0) {
            uint32_t pair[4];
            slab_pairs(pair, scales + chunk * 64, g, true);
            add_scaled(acc, sum, pair);
            if (ZEROS == 1) {
                slab_pairs(pair, zeros + chunk * 64, g, true);
                add_correction(acc, a_sum, pair);
            }
        }
    }

    // Sum over the block's warps, then over the blocks of one column of the grid, in ascending order.
    copy_wait<0>();
    __syncthreads();
    float* shared = reinterpret_cast<float*>(smem);  // [k_warp][chunk][row][SUM_PITCH]
    constexpr int CHUNK_FLOATS = ROWS * SUM_PITCH;
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            shared[warp * CHUNK_FLOATS + (2 * t + i % 2) * SUM_PITCH + 16 * j + g + 8 * (i / 2)] = acc[j][i];
    __syncthreads();

    // Four columns a thread at a time.
    constexpr int QUADS = 16 * CHUNKS;  // of a row
    const int quads = m * QUADS;
    const bool split = gridDim.y > 1;
    Float4* slots = partials + static_cast<int64_t>(blockIdx.x) * gridDim.y * quads;
    const auto sum_over_warps = [&](int quad) {
        const int row = quad / QUADS, column = quad % QUADS * 4;
        const float* from = shared + column / 64 * CHUNK_FLOATS + row * SUM_PITCH + column % 64;
        Float4 sum = {0, 0, 0, 0};
#pragma unroll
        for (int w = 0; w < K_WARPS; w++) add(sum, *reinterpret_cast<const Float4*>(from + w * CHUNKS * CHUNK_FLOATS));
        return sum;
    };
    if (split) {
        for (int i = threadIdx.x; i < quads; i += THREADS) slots[blockIdx.y * quads + i] = sum_over_warps(i);
        __shared__ uint32_t arrived;
        const uint32_t before = count_in(counters + blockIdx.x);
        if (threadIdx.x == 0) {
            arrived = before;
            if (before == gridDim.y - 1) counters[blockIdx.x] = 0;
        }
        __syncthreads();
        if (arrived != gridDim.y - 1) return;
    }
    const auto total = [&](int quad) {
        if (!split) return sum_over_warps(quad);
        Float4 sum = {0, 0, 0, 0};
#pragma unroll 4
        for (int s = 0; s < gridDim.y; s++) add(sum, load_l2(slots + s * quads + quad));
        return sum;
    };
    if (!gated) {
        for (int i = threadIdx.x; i < quads; i += THREADS)
            store(total(i), bias, c + i / QUADS * ldc, blockIdx.x * (64 * CHUNKS) + i % QUADS * 4, n);
    } else {
        // Of every four quads two are gate's, and the two after them up's for the same columns of C.
        for (int i = threadIdx.x; i < quads / 2; i += THREADS) {
            const Float4 gate = total(2 * i - i % 2), up = total(2 * i - i % 2 + 2);
            const Float4 out = {silu(gate.x) * up.x, silu(gate.y) * up.y, silu(gate.z) * up.z, silu(gate.w) * up.w};
            store(out, nullptr, c + i / (QUADS / 2) * ldc, blockIdx.x * (32 * CHUNKS) + i % (QUADS / 2) * 4, n);
        }
    }
}
