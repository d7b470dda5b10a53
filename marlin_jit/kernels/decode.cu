// marlin_decode: C[M, N] = A[M, K] @ W[K, N] (+ bias) for M <= 24, bound by reading W once. `gated` as in marlin.cu.
//
// What is computed. The same transposed product and fragments as marlin.cu, but scales act on float32 sums: within a
// group the mma adds exact integers q - 8 (or q - z, z an integer zero point) times A, then acc += scale * sum. A real
// zero adds delta * group sum of A, which one more mma with an all-ones fragment delivers. Weights are never rounded.
//
// Who holds what. A warp takes one chunk of 64 columns and a contiguous run of k in blocks of 128. Each lane's share of
// a block is eight 16-byte vectors of B, loaded straight into registers while the block before it is multiplied, in one
// of two sets; there is no barrier in the loop. The block's activations and scales lie in a small buffer of the warp's
// own in shared memory, two blocks deep.
//
// How work is cut. A thread block of 32 * chunks x k_warps threads is `chunks` columns of warps, of which k_warps share
// their k; gridDim.y blocks split k further. Sums over warps go through shared memory. Sums over blocks do too where the
// blocks of a column of the grid are a cluster: its first block receives and adds them. Elsewhere they go through
// `partials`, and the block that arrives last adds them and leaves the counter at zero. All in a fixed order. Of a
// column's warps, in all its blocks, each takes `share` blocks of 128 k, and the first `extra` of them one more.
//
// Build constants: BF16, GROUP (32, 64, 128; 0 = one group a column), ZEROS (0 = symmetric, 1 = deltas, 2 = zero
// points), M_BLOCKS (1, 2, 3: M <= 8, 16, 24), MAX_WARPS (of a block; bounds the registers).
#include "layout.cuh"
#include "numeric.cuh"

constexpr int BLOCK_K = 128;
constexpr int STEPS = BLOCK_K / 16;
constexpr int ROWS = 8 * M_BLOCKS;
constexpr int GROUP_K = GROUP == 0 ? 1 : GROUP;
constexpr int SCALE_ROWS = GROUP == 0 ? 0 : BLOCK_K / GROUP_K;
constexpr int GROUP_STEPS = GROUP == 0 ? STEPS : GROUP / 16;

constexpr int A_PITCH = BLOCK_K * 2 + 16;  // bytes; the odd 16 spread the rows of an ldmatrix over the banks
constexpr int S_AT = ROWS * A_PITCH;  // one 128-byte row of the chunk's 64 scales a group, then the same of zeros
constexpr int Z_AT = S_AT + SCALE_ROWS * 128;
constexpr int BUFFER = Z_AT + (ZEROS ? SCALE_ROWS * 128 : 0);
constexpr int WARP_BYTES = 2 * BUFFER;
constexpr int SUM_PITCH = 68;  // floats; lanes of a fragment (row 2t, column g) then meet no bank twice
static_assert(ROWS * SUM_PITCH * 4 <= WARP_BYTES, "sums take the place of the buffers");

// Weights are read once: no reason to keep them in L1. Keeps the old value where the predicate is false.
__device__ __forceinline__ void load_stream16_if(Vec4& v, const void* from, bool wanted) {
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.b32 p, %5, 0;\n"
        " @p ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];\n}"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(from), "r"(static_cast<int>(wanted)));
}

// One lane's share of the copies of k-blocks into its warp's buffers: activations, two rows of 256 bytes a pass (k from K
// on, K rounded up to 8, arrives as zeros; rows from M on are left as they are, for they only reach rows of C that do
// not exist), then scales and zeros, eight lanes a row (rows past the last group arrive as zeros).
struct Loader {
    const uint8_t* a;  // of the next block
    int64_t a_pass;    // bytes between passes
    int rows, k_left;  // from this lane's first row and column on
    uint32_t a_to;
    uint32_t scale_at, scale_step;  // bytes
    int groups_left;

    __device__ __forceinline__ Loader(const uint16_t* a, int64_t lda, int m, int k, int padded_n, int padded_k, int chunk,
                                      int block) {
        const int lane = threadIdx.x % 32, row = lane / 16, column = lane % 16 * 8;
        this->a = reinterpret_cast<const uint8_t*>(a + row * lda + block * BLOCK_K + column);
        a_pass = lda * 4;
        rows = m - row, k_left = k - block * BLOCK_K - column;
        a_to = row * A_PITCH + column * 2;
        const int group = block * SCALE_ROWS + lane / 8;
        scale_at = static_cast<uint32_t>(group) * padded_n * 2 + chunk * 128 + lane % 8 * 16;
        scale_step = SCALE_ROWS * 2 * padded_n;
        groups_left = padded_k / GROUP_K - group;
    }
    __device__ __forceinline__ void issue(uint32_t buffer, const uint16_t* scales, const uint16_t* zeros) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++)
            if (rows > 2 * i) copy_async16_l1(buffer + a_to + i * (2 * A_PITCH), a + i * a_pass, k_left > 0 ? 16 : 0);
        if (SCALE_ROWS > 0 && lane < SCALE_ROWS * 8) {
            const int bytes = groups_left > 0 ? 16 : 0;
            copy_async16(buffer + S_AT + lane * 16, reinterpret_cast<const uint8_t*>(scales) + scale_at, bytes);
            if (ZEROS) copy_async16(buffer + Z_AT + lane * 16, reinterpret_cast<const uint8_t*>(zeros) + scale_at, bytes);
        }
        copy_commit();
        a += BLOCK_K * 2, k_left -= BLOCK_K;
        scale_at += scale_step, groups_left -= SCALE_ROWS;
    }
};

using Sums = float[4][M_BLOCKS][4];  // [slab j][8-row block][fragment], as in marlin.cu
using RowSums = float[M_BLOCKS][4];  // of activations; elements 2 and 3 repeat 0 and 1

// The sums of a group, scaled, and its correction.
__device__ __forceinline__ void add_scaled(Sums& acc, const Sums& sum, const uint32_t (&pair)[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float low = Type::to_float(pair[j] & 0xffff), high = Type::to_float(pair[j] >> 16);
#pragma unroll
        for (int mb = 0; mb < M_BLOCKS; mb++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[j][mb][i] += (i < 2 ? low : high) * sum[j][mb][i];
    }
}
__device__ __forceinline__ void add_correction(Sums& acc, const RowSums& a_sum, const uint32_t (&pair)[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float low = Type::to_float(pair[j] & 0xffff), high = Type::to_float(pair[j] >> 16);
#pragma unroll
        for (int mb = 0; mb < M_BLOCKS; mb++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[j][mb][i] += (i < 2 ? low : high) * a_sum[mb][i];
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

extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS, 1)
    marlin_decode(const uint16_t* a, int64_t lda, const uint32_t* b, const uint16_t* scales, const uint16_t* zeros,
                  const uint16_t* bias, uint16_t* c, int64_t ldc, int m, int n, int k, int padded_n, int padded_k,
                  int gated, int clustered, int share, int extra, Float4* partials, uint32_t* counters) {
    extern __shared__ __align__(128) uint8_t smem[];
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    // Shuffled, so that the compiler knows them to be the same for all lanes.
    const int chunk_in_block = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), k_warp = __shfl_sync(0xffffffff, threadIdx.y, 0);
    const int chunks = blockDim.x / 32, warp = k_warp * chunks + chunk_in_block, chunk = blockIdx.x * chunks + chunk_in_block;
    const int blocks = (padded_k + BLOCK_K - 1) / BLOCK_K, worker = blockIdx.y * blockDim.y + k_warp;
    const int first = worker * share + min(worker, extra);
    const int last = chunk * 64 < padded_n ? first + share + (worker < extra ? 1 : 0) : first;

    if (clustered) cluster_begin();
    Sums acc = {};
    if (first >= last) {
        wait_for_previous_grid();
    } else {
        const uint32_t buffers[2] = {shared_address(smem) + warp * WARP_BYTES,
                                     shared_address(smem) + warp * WARP_BYTES + BUFFER};
        const uint32_t row_bytes = 8 * padded_n;  // of one k16 of W
        const uint8_t* next_w =
            reinterpret_cast<const uint8_t*>(b + chunk * 128 + lane * 4) + static_cast<int64_t>(first) * STEPS * row_bytes;
        // A warp can wait for its loads only all together: those of the next block, issued before those of this one
        // have come, would be waited for at once. So their addresses depend on a word of this one. (The compiler does
        // not know that a grid is one block deep.)
        const uint32_t none = gridDim.z - 1;
        const auto load_weights = [&](Vec4(&w)[STEPS], int block) {
            // A last block of 64 k has no upper half.
            const bool upper = padded_k % BLOCK_K == 0 || block + 1 < blocks;
#pragma unroll
            for (int i = 0; i < STEPS; i++, next_w += row_bytes) load_stream16_if(w[i], next_w, i < STEPS / 2 || upper);
        };
        Loader loader(a, lda, m, k, padded_n, padded_k, chunk, first);
        Vec4 even[STEPS] = {}, odd[STEPS] = {};
        load_weights(even, first);
        wait_for_previous_grid();
        loader.issue(buffers[0], scales, zeros);

        Sums sum = {};
        RowSums a_sum = {};
        ZeroPoints points[4];
        if (GROUP == 0 && ZEROS == 2) {
            uint32_t pair[4];
            slab_pairs(pair, zeros + chunk * 64, g, true);
#pragma unroll
            for (int j = 0; j < 4; j++) points[j] = zero_points(pair[j]);
        }
        const auto multiply = [&](int block, uint32_t here, uint32_t there, const Vec4(&w)[STEPS], Vec4(&next)[STEPS]) {
            __syncwarp();  // everybody has left the buffer that is filled next
            next_w += w[STEPS - 1].w & none;
            if (block + 1 < last) {
                load_weights(next, block + 1);
                loader.issue(there, scales, zeros);
            } else {
                copy_commit();
            }
            copy_wait<1>();
            __syncwarp();
            const uint32_t from = here + (lane & 7) * A_PITCH + (lane >> 3) * 16;
            uint32_t f[M_BLOCKS][4];  // {b0, b1} of an even step, {b0, b1} of the next
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                const bool begins = GROUP != 0 && step % GROUP_STEPS == 0, ends = GROUP != 0 && (step + 1) % GROUP_STEPS == 0;
                const int row = step / GROUP_STEPS * 128 + g * 16;  // of scales
                if (begins && ZEROS == 2) {
                    uint32_t pair[4];
                    load_shared16(pair, here + Z_AT + row);
#pragma unroll
                    for (int j = 0; j < 4; j++) points[j] = zero_points(pair[j]);
                }
                if (step % 2 == 0)
#pragma unroll
                    for (int mb = 0; mb < M_BLOCKS; mb++) load_matrix4(f[mb], from + mb * (8 * A_PITCH) + step * 32);
                uint32_t q[4] = {w[step].x, w[step].y, w[step].z, w[step].w};
                // Small groups are not unpacked before their scales or zeros are there: all of a block's at once would
                // take more registers than there are. (`none` is zero.)
                if (GROUP == 32 && begins && ZEROS != 2) {
                    uint32_t pair[4];
                    load_shared16(pair, here + S_AT + row);
#pragma unroll
                    for (int j = 0; j < 4; j++) q[j] ^= pair[j] & none;
                }
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    uint32_t codes[4];
                    if (ZEROS == 2)
                        shifted(codes, q[j], points[j]);
                    else
                        centered(codes, q[j]);
#pragma unroll
                    for (int mb = 0; mb < M_BLOCKS; mb++)
                        Type::mma(sum[j][mb], codes, f[mb][step % 2 * 2], f[mb][step % 2 * 2 + 1], begins);
                }
                if (ZEROS == 1) {
                    const uint32_t ones[4] = {Type::ONES, Type::ONES, Type::ONES, Type::ONES};
#pragma unroll
                    for (int mb = 0; mb < M_BLOCKS; mb++)
                        Type::mma(a_sum[mb], ones, f[mb][step % 2 * 2], f[mb][step % 2 * 2 + 1], begins);
                }
                if (ends) {
                    uint32_t pair[4];
                    load_shared16(pair, here + S_AT + row);
                    add_scaled(acc, sum, pair);
                    if (ZEROS == 1) {
                        load_shared16(pair, here + Z_AT + row);
                        add_correction(acc, a_sum, pair);
                    }
                }
            }
        };
#pragma unroll 1
        for (int block = first; block < last; block += 2) {
            multiply(block, buffers[0], buffers[1], even, odd);
            if (block + 1 < last) multiply(block + 1, buffers[1], buffers[0], odd, even);
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

    // Sum over the block's warps, a quad (four columns of a row) a thread at a time, in ascending order. Quads are counted
    // as [chunk][row][16]; a sum takes the place of the first warp's.
    copy_wait<0>();
    __syncthreads();
    float* shared = reinterpret_cast<float*>(smem);  // [k_warp][chunk][row][SUM_PITCH]
    constexpr int CHUNK_FLOATS = ROWS * SUM_PITCH, CHUNK_QUADS = ROWS * 16;
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int i = 0; i < 4 * M_BLOCKS; i++)
            shared[warp * CHUNK_FLOATS + (i / 4 * 8 + 2 * t + i % 2) * SUM_PITCH + 16 * j + g + i % 4 / 2 * 8] =
                (&acc[j][0][0])[i];
    __syncthreads();
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
    const int quads = chunks * CHUNK_QUADS;
    const auto place = [&](int quad) {
        return reinterpret_cast<Float4*>(shared + quad / CHUNK_QUADS * CHUNK_FLOATS + quad / 16 % ROWS * SUM_PITCH + quad % 16 * 4);
    };
    const bool split = gridDim.y > 1;
    Float4* received = reinterpret_cast<Float4*>(smem + threads / 32 * WARP_BYTES);  // of a cluster's other blocks
    Float4* slots = partials + static_cast<int64_t>(blockIdx.x) * gridDim.y * quads;
    if (clustered) cluster_wait();  // all have begun
#pragma unroll 1
    for (int i = thread; i < quads; i += threads) {
        if (i / 16 % ROWS >= m) continue;
        Float4* from = place(i);
        Float4 sum = *from;
#pragma unroll 4
        for (int w = 1; w < blockDim.y; w++) add(sum, from[w * chunks * (CHUNK_FLOATS / 4)]);
        if (clustered && blockIdx.y > 0)
            store_cluster(cluster_address(shared_address(received + (blockIdx.y - 1) * quads + i), 0), sum);
        else if (split && !clustered)
            slots[blockIdx.y * quads + i] = sum;
        else
            *from = sum;
    }

    // Then over the blocks of one column of the grid.
    if (clustered) {
        cluster_arrive();
        if (blockIdx.y > 0) return;
        cluster_wait();
    } else if (split) {
        __shared__ uint32_t arrived;
        __syncthreads();
        if (thread == 0) {
            arrived = count_in(counters + blockIdx.x);
            if (arrived == gridDim.y - 1) counters[blockIdx.x] = 0;
        }
        __syncthreads();
        if (arrived != gridDim.y - 1) return;
    }
#pragma unroll 1
    for (int i = thread; i < quads; i += threads) {
        const int row = i / 16 % ROWS;
        if (row >= m) continue;
        Float4 sum;
        if (clustered || !split) {
            sum = *place(i);
            for (int s = 1; s < gridDim.y; s++) add(sum, received[(s - 1) * quads + i]);
        } else {
            sum = load_l2(slots + i);
#pragma unroll 4
            for (int s = 1; s < gridDim.y; s++) add(sum, load_l2(slots + s * quads + i));
        }
        if (gated)
            *place(i) = sum;
        else
            store(sum, bias, c + row * ldc, (blockIdx.x * chunks + i / CHUNK_QUADS) * 64 + i % 16 * 4, n);
    }
    if (!gated) return;
    __syncthreads();
#pragma unroll 1
    for (int i = thread; i < quads / 2; i += threads) {
        // Of every four quads two are gate's, and the two after them up's for the same columns of C.
        const int row = i / 8 % ROWS, from = 2 * i - i % 2;
        if (row >= m) continue;
        const Float4 gate = *place(from), up = *place(from + 2);
        const Float4 out = {silu(gate.x) * up.x, silu(gate.y) * up.y, silu(gate.z) * up.z, silu(gate.w) * up.w};
        store(out, nullptr, c + row * ldc, (blockIdx.x * chunks + i / (CHUNK_QUADS / 2)) * 32 + i % 8 * 4, n);
    }
}
