// marlin_gemm: C[M, N] = A[M, K] @ W[K, N] (+ bias), W in the Marlin format, on tensor cores (mma.sync, sm_80 and up).
// With `gated`, C[M, N] = silu(A @ gate) * (A @ up), where W holds 8 columns of gate and 8 of up in turn, without bias.
//
// What is computed. The transpose: C^T = W^T A^T, so that one 32-bit word of B is exactly one mma A fragment
// (16 columns n x 16 rows k) and activations are the B operand, eight rows m at a time. Weights become (q - 8) * scale,
// with deltas (q - 8) * scale + delta, with integer zero points (q - z) * scale, in the activation type; products are
// accumulated in float32.
//
// Who holds what. A block owns a tile of M_TILE rows x TILE_N = 64 * WARPS_N columns. Its warps stand in a grid:
// warp (wn, wk) takes the 64 columns of chunk wn and, in every stage, the wk-th share of the stage's k. Lane
// (g = lane / 4, t = lane % 4) holds for its chunk's four 16-column slabs j and every 8-row block mb
//     acc[j][mb][0..3] = C at (n = 16j+g, m = 8mb+2t), (same n, m+1), (n+8, m), (n+8, m+1).
//
// How work is cut. A unit is K_STAGE of one tile's k; tiles.cuh says which block takes which units, and how those that
// share a tile add up.
//
// Build constants: BF16, M_TILE (16, 32, 64), WARPS_N, WARPS_K (1, 2), K_STAGE (64, 128), STAGES, GROUP (32, 64, 128;
// 0 = one group a column), ZEROS (0 = symmetric, 1 = deltas, 2 = zero points), MIN_BLOCKS (blocks an SM, bounds the
// registers).
#include "layout.cuh"
#include "tiles.cuh"
#include "weigh.cuh"

constexpr int WARPS = WARPS_N * WARPS_K;
constexpr int THREADS = 32 * WARPS;
constexpr int TILE_N = 64 * WARPS_N;
constexpr int M_BLOCKS = M_TILE / 8;
constexpr int STEPS = K_STAGE / 16;          // k16 steps of a stage
constexpr int WARP_STEPS = STEPS / WARPS_K;  // of them, each warp's
constexpr int OWN = 4 / WARPS_K;             // slabs a warp finishes after the sum over wk
// Scales are fetched three slabs before their first use, or one where that is a small part of the work.
constexpr bool EARLY_SCALES = M_TILE < 64 || K_STAGE == 64;
constexpr int SCALE_ROWS = GROUP == 0 ? 0 : (K_STAGE > GROUP ? K_STAGE / GROUP : 1);
static_assert(WARP_STEPS % 2 == 0, "fragments alternate between two register sets");

// A stage in shared memory: activations as K_STAGE/64 blocks of [M_TILE][64] whose 16-byte columns are XOR-swizzled by
// the row (so that ldmatrix meets no bank conflict), weights as [step][chunk][lane], then rows of scales and zeros.
constexpr int A_BYTES = M_TILE * K_STAGE * 2;
constexpr int W_BYTES = STEPS * WARPS_N * 512;
constexpr int S_BYTES = SCALE_ROWS * TILE_N * 2;
constexpr int W_AT = A_BYTES;
constexpr int S_AT = W_AT + W_BYTES;
constexpr int Z_AT = S_AT + S_BYTES;
constexpr int STAGE_BYTES = Z_AT + (ZEROS ? S_BYTES : 0);

struct Problem {
    const uint16_t* a;
    int64_t lda;
    const uint32_t* b;
    const uint16_t* scales;
    const uint16_t* zeros;  // deltas, or what is added to codes for their zero points (Type::code)
    const uint16_t* bias;  // or null
    uint16_t* c;
    int64_t ldc;
    int m, n, k;
    int padded_n, padded_k;
    bool gated;
};

// ---- global -> shared ---------------------------------------------------------------------------------------------

// One thread's share of the copies of a tile. Addresses advance by a stage at a time; what is out of range is not
// read but zero-filled, except columns of W and scales past the last chunk: they repeat it, and are never stored.
// K counts the activations' columns rounded up to 8 (the launcher sees to it that those past the true K are zero): a
// copy of fewer than 16 bytes costs a dozen more instructions.
struct Loader {
    static constexpr int A_PASSES = A_BYTES / 16 / THREADS, W_PASSES = W_BYTES / 16 / THREADS;
    static constexpr int A_ROWS = THREADS / 8;                // rows of A a pass
    static constexpr int W_ROWS = THREADS / (32 * WARPS_N);   // k16 rows of W a pass
    static constexpr int PASSES_A_BLOCK = M_TILE / A_ROWS;    // passes over 64 columns of A
    static constexpr int S_PIECES = SCALE_ROWS * TILE_N / 8;  // one a thread
    static_assert(A_PASSES * THREADS * 16 == A_BYTES && W_PASSES * THREADS * 16 == W_BYTES, "whole passes only");
    static_assert(S_PIECES <= THREADS, "scales are one pass");

    const uint16_t* a;  // of the next stage
    const uint32_t* w;
    int64_t a_pass, w_pass;  // bytes between passes
    int rows_left, k_left;   // of A, seen from this thread's first row and column
    int k16_left;            // of W, from its first row
    int scale_row, scale_at;
    uint32_t a_to, w_to;
    int stages_left;

    __device__ __forceinline__ Loader(const Problem& p, const Tile& tile, int first, int last) {
        const int thread = threadIdx.x, row = thread / 8, column = thread % 8, k0 = first * K_STAGE;
        a = p.a + static_cast<int64_t>(tile.m0 + row) * p.lda + k0 + column * 8;
        a_pass = p.lda * (2 * A_ROWS);
        rows_left = p.m - tile.m0 - row, k_left = p.k - k0 - column * 8;
        a_to = row * 128 + ((column ^ (row & 7)) << 4);

        const int k16 = k0 / 16 + thread / (32 * WARPS_N), within = thread % (32 * WARPS_N);
        const int n = min(tile.n0 + within / 32 * 64, p.padded_n - 64);
        w = p.b + static_cast<int64_t>(k16) * (2 * p.padded_n) + 2 * n + within % 32 * 4;
        w_pass = static_cast<int64_t>(p.padded_n) * (8 * W_ROWS);
        k16_left = p.padded_k / 16 - k16;
        w_to = W_AT + thread * 16;

        scale_row = thread / (TILE_N / 8);
        scale_at = min(tile.n0 + thread % (TILE_N / 8) * 8, p.padded_n - 8);
        stages_left = last - first;
    }

    __device__ __forceinline__ void issue(uint32_t stage, const Problem& p, int unit) {
        const bool live = stages_left > 0;
#pragma unroll
        for (int i = 0; i < A_PASSES; i++) {
            const int block = i / PASSES_A_BLOCK, pass = i % PASSES_A_BLOCK;
            const bool inside = live && 64 * block < k_left && pass * A_ROWS < rows_left;
            copy_async16(stage + a_to + block * (M_TILE * 128) + pass * (A_ROWS * 128),
                         reinterpret_cast<const uint8_t*>(a) + block * 128 + pass * a_pass, inside ? 16 : 0);
        }
#pragma unroll
        for (int i = 0; i < W_PASSES; i++) {
            const bool inside = live && (K_STAGE == 64 || i * W_ROWS < k16_left);
            copy_async16(stage + w_to + i * (THREADS * 16), reinterpret_cast<const uint8_t*>(w) + i * w_pass,
                         inside ? 16 : 0);
        }
        if (GROUP != 0 && (S_PIECES == THREADS || threadIdx.x < S_PIECES)) {
            const int group = unit * K_STAGE / (GROUP == 0 ? 1 : GROUP) + scale_row;
            const bool inside = live && group * GROUP < p.padded_k;
            const int64_t at = static_cast<int64_t>(group) * p.padded_n + scale_at;
            copy_async16(stage + S_AT + threadIdx.x * 16, p.scales + at, inside ? 16 : 0);
            if (ZEROS) copy_async16(stage + Z_AT + threadIdx.x * 16, p.zeros + at, inside ? 16 : 0);
        }
        copy_commit();
        a += K_STAGE, k_left -= K_STAGE;
        w += STEPS / W_ROWS * (w_pass / 4), k16_left -= STEPS;
        stages_left--;
    }
};

// Asks L2 for the weights that a run of units begins with, while the grid before this one still works.
__device__ __forceinline__ void prefetch_weights(const Problem& p, const Tile& tile, int first, int last) {
    constexpr int LINES = 2 * WARPS_N * 2;  // of 128 bytes, in a k16 row of the tile
    const int rows = min((STAGES - 1) * STEPS, (last - first) * STEPS);
    for (int i = threadIdx.x; i < rows * LINES; i += THREADS) {
        const int k16 = first * STEPS + i / LINES, n = min(tile.n0 + i % LINES * 16, p.padded_n - 16);
        if (k16 * 16 < p.padded_k) prefetch_l2(p.b + static_cast<int64_t>(k16) * (2 * p.padded_n) + 2 * n);
    }
}

// ---- shared -> registers -> tensor cores --------------------------------------------------------------------------

struct Warp {
    int lane, g, t, wn, wk;
    uint32_t a_at;        // this lane's ldmatrix address in a stage, at its warp's first step
    uint32_t w_at, s_at;  // its word vector there, and its scales in the stage's first row
    __device__ __forceinline__ Warp() {
        lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const int warp = threadIdx.x / 32;
        wn = warp % WARPS_N, wk = warp / WARPS_N;
        // Matrices in lane order: (m 0-7, k 0-7), (m 0-7, k 8-15), (m 8-15, k 0-7), (m 8-15, k 8-15).
        const int row = (lane & 7) + ((lane >> 4) << 3), column = (lane >> 3) & 1;
        const int first = wk * WARP_STEPS;
        a_at = (first / 4) * (M_TILE * 128) + row * 128 + ((column ^ (row & 7) ^ (2 * (first % 4))) << 4);
        w_at = W_AT + ((first * WARPS_N + wn) * 32 + lane) * 16;
        s_at = S_AT + wn * 128 + g * 16;
    }
};

struct Fragments {
    uint32_t words[4];           // one k16 of each slab
    uint32_t b[M_TILE / 16][4];  // {b0, b1} of two 8-row blocks
};
__device__ __forceinline__ void fetch(Fragments& f, uint32_t stage, const Warp& w, int step) {
    load_shared16(f.words, stage + w.w_at + step * (WARPS_N * 512));
#pragma unroll
    for (int i = 0; i < M_TILE / 16; i++)
        load_matrix4(f.b[i], stage + (step / 4) * (M_TILE * 128) + i * 2048 + (w.a_at ^ ((step % 4) << 5)));
}

__device__ __forceinline__ bool group_begins(int step) { return GROUP != 0 && (step == 0 || step * 16 % GROUP == 0); }

__device__ __forceinline__ void fetch_scales(Scales<4>& s, uint32_t stage, const Warp& w, int step) {
    const int row = SCALE_ROWS > 1 ? (w.wk * WARP_STEPS + step) * 16 / (GROUP == 0 ? 1 : GROUP) : 0;
    uint32_t zeros[4] = {};
    load_shared16(s.scale, stage + w.s_at + row * (TILE_N * 2));
    if (ZEROS) load_shared16(zeros, stage + w.s_at + (Z_AT - S_AT) + row * (TILE_N * 2));
    s.set_zeros(zeros);
}

// One group a column: read once a tile, straight from global memory.
__device__ __forceinline__ void column_scales(Scales<4>& s, const Problem& p, const Tile& tile, const Warp& w) {
    const int n = min(tile.n0 + w.wn * 64, p.padded_n - 64);
    uint32_t zeros[4] = {};
    slab_pairs(s.scale, p.scales + n, w.g, true);
    if (ZEROS) slab_pairs(zeros, p.zeros + n, w.g, true);
    s.set_zeros(zeros);
}

using Accumulators = float[4][M_BLOCKS][4];

// Multiplies slab j, whose weights are ready, and meanwhile makes those of the next one: the unpacking of one slab and
// the mma of another do not depend on each other, so neither waits.
__device__ __forceinline__ void multiply(float (&acc)[M_BLOCKS][4], const uint32_t (&a)[4], const Fragments& f,
                                         uint32_t (&next)[4], uint32_t next_word, const Scales<4>& s, int next_j) {
#pragma unroll
    for (int mb = 0; mb < M_BLOCKS; mb++) {
        Type::mma(acc[mb], a, f.b[mb / 2][mb % 2 * 2], f.b[mb / 2][mb % 2 * 2 + 1]);
        if (mb == M_BLOCKS * 1 / 8) weigh<0>(next, next_word, s, next_j);
        if (mb == M_BLOCKS * 3 / 8) weigh<1>(next, next_word, s, next_j);
        if (mb == M_BLOCKS * 5 / 8) weigh<2>(next, next_word, s, next_j);
        if (mb == M_BLOCKS * 7 / 8) weigh<3>(next, next_word, s, next_j);
    }
}

// Adds units [first, last) of a tile to acc. While a stage is multiplied, the slot of the stage before it is refilled;
// fragments of the next step are fetched before the current step is multiplied.
__device__ __forceinline__ void run_units(Accumulators& acc, uint32_t smem, const Problem& p, const Tile& tile,
                                          const Warp& w, int first, int last) {
    Loader loader(p, tile, first, last);
#pragma unroll 1
    for (int s = 0; s < STAGES - 1; s++) loader.issue(smem + s * STAGE_BYTES, p, first + s);
    Fragments f[2];
    Scales<4> scales;
    if (GROUP == 0) column_scales(scales, p, tile, w);
    copy_wait<STAGES - 2>();
    __syncthreads();
    uint32_t stage = smem, refill = smem + (STAGES - 1) * STAGE_BYTES;
    fetch(f[0], stage, w, 0);
    if (GROUP != 0) fetch_scales(scales, stage, w, 0);
    uint32_t a[2][4];  // weights of this slab and the next
    weigh_word(a[0], f[0].words[0], scales, 0);
#pragma unroll 1
    for (int unit = first; unit < last; unit++) {
        loader.issue(refill, p, unit + STAGES - 1);
#pragma unroll
        for (int step = 0; step < WARP_STEPS; step++) {
            if (step + 1 < WARP_STEPS) {
                fetch(f[(step + 1) % 2], stage, w, step + 1);
            } else {
                copy_wait<STAGES - 2>();
                __syncthreads();
                refill = stage;
                stage = stage == smem + (STAGES - 1) * STAGE_BYTES ? smem : stage + STAGE_BYTES;
                fetch(f[(step + 1) % 2], stage, w, 0);
            }
            const Fragments &now = f[step % 2], &then = f[(step + 1) % 2];
            const int next_step = (step + 1) % WARP_STEPS;
            const Scales<4> current = scales;
            if (EARLY_SCALES && group_begins(next_step)) fetch_scales(scales, stage, w, next_step);
#pragma unroll
            for (int j = 0; j < 3; j++)
                multiply(acc[j], a[j % 2], now, a[(j + 1) % 2], now.words[j + 1], current, j + 1);
            if (!EARLY_SCALES && group_begins(next_step)) fetch_scales(scales, stage, w, next_step);
            multiply(acc[3], a[1], now, a[0], then.words[0], scales, 0);  // and the first slab of the next step
        }
    }
    copy_wait<0>();
    __syncthreads();
}

// ---- sums over warps -----------------------------------------------------------------------------------------------

using Owned = float[OWN][M_BLOCKS][4];

// Adds the WARPS_K partial sums of each chunk in ascending wk; warp wk keeps slabs [wk * OWN, (wk + 1) * OWN).
__device__ __forceinline__ void sum_over_warps(Owned& own, const Accumulators& acc, uint8_t* smem, const Warp& w) {
    if constexpr (WARPS_K == 1) {
#pragma unroll
        for (int i = 0; i < 4 * M_BLOCKS * 4; i++) (&own[0][0][0])[i] = (&acc[0][0][0])[i];
    } else {
        Float4* shared = reinterpret_cast<Float4*>(smem);
        constexpr int SENT = 4 - OWN;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j / OWN == w.wk) continue;
            const int at = j / OWN < w.wk ? j : j - OWN;
#pragma unroll
            for (int mb = 0; mb < M_BLOCKS; mb++) {
                const float(&v)[4] = acc[j][mb];
                shared[(((w.wk * SENT + at) * M_BLOCKS + mb) * WARPS_N + w.wn) * 32 + w.lane] = {v[0], v[1], v[2], v[3]};
            }
        }
#pragma unroll
        for (int j = 0; j < OWN; j++)
#pragma unroll
            for (int i = 0; i < M_BLOCKS * 4; i++) {
                float mine = (&acc[j][0][0])[i];
#pragma unroll
                for (int wk = 1; wk < WARPS_K; wk++) mine = w.wk == wk ? (&acc[wk * OWN + j][0][0])[i] : mine;
                (&own[j][0][0])[i] = mine;
            }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < OWN; j++)
#pragma unroll
            for (int mb = 0; mb < M_BLOCKS; mb++) {
                Float4 sum = {0, 0, 0, 0};
#pragma unroll
                for (int from = 0; from < WARPS_K; from++) {
                    const int slab = w.wk * OWN + j;
                    const int at = w.wk < from ? slab : slab - OWN;
                    const float(&mine)[4] = own[j][mb];
                    const Float4 v = from == w.wk ? Float4{mine[0], mine[1], mine[2], mine[3]}
                                                  : shared[(((from * SENT + at) * M_BLOCKS + mb) * WARPS_N + w.wn) * 32 + w.lane];
                    sum = {sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w};
                }
                own[j][mb][0] = sum.x, own[j][mb][1] = sum.y, own[j][mb][2] = sum.z, own[j][mb][3] = sum.w;
            }
        __syncthreads();
    }
}

constexpr int PARTIAL = OWN * M_BLOCKS;  // Float4s a thread
struct Block {
    static constexpr int COUNT = THREADS;
    static __device__ __forceinline__ void sync() { __syncthreads(); }
};

// ---- registers -> global -------------------------------------------------------------------------------------------

constexpr int PITCH = TILE_N + 8;  // elements; the odd 16 bytes spread rows over the banks

// Rounds once, turns the transposed fragments by movmatrix, and leaves them in shared memory as rows.
__device__ __forceinline__ void round_tile(const Owned& own, uint16_t* shared, const Problem& p, const Tile& tile,
                                           const Warp& w) {
#pragma unroll
    for (int j = 0; j < OWN; j++) {
        const int column = w.wn * 64 + (w.wk * OWN + j) * 16;
        const int n = tile.n0 + column + w.g;
        float bias[2] = {0.f, 0.f};
        if (p.bias != nullptr) {
            if (n < p.n) bias[0] = Type::to_float(p.bias[n]);
            if (n + 8 < p.n) bias[1] = Type::to_float(p.bias[n + 8]);
        }
#pragma unroll
        for (int mb = 0; mb < M_BLOCKS; mb++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float(&v)[4] = own[j][mb];
                const uint32_t rows_n = Type::pair(v[2 * half] + bias[half], v[2 * half + 1] + bias[half]);
                const uint32_t rows_m = transpose8x8(rows_n);
                *reinterpret_cast<uint32_t*>(shared + (8 * mb + w.g) * PITCH + column + 8 * half + 2 * w.t) = rows_m;
            }
    }
}

// The same for gate and up: a lane holds column g of both, as its columns n = g and g + 8.
__device__ __forceinline__ void round_gated_tile(const Owned& own, uint16_t* shared, const Warp& w) {
#pragma unroll
    for (int j = 0; j < OWN; j++) {
        const int feature = w.wn * 32 + (w.wk * OWN + j) * 8;
#pragma unroll
        for (int mb = 0; mb < M_BLOCKS; mb++) {
            const float(&v)[4] = own[j][mb];
            const uint32_t rows_m = transpose8x8(Type::pair(silu(v[0]) * v[2], silu(v[1]) * v[3]));
            *reinterpret_cast<uint32_t*>(shared + (8 * mb + w.g) * PITCH + feature + 2 * w.t) = rows_m;
        }
    }
}

// Writes a tile as 16-byte rows.
__device__ __forceinline__ void store_tile(const Owned& own, uint8_t* smem, const Problem& p, const Tile& tile,
                                           const Warp& w) {
    uint16_t* shared = reinterpret_cast<uint16_t*>(smem);
    if (p.gated)
        round_gated_tile(own, shared, w);
    else
        round_tile(own, shared, p, tile, w);
    __syncthreads();
    const bool aligned = ((reinterpret_cast<uint64_t>(p.c) | (p.ldc * 2)) & 15) == 0;
    const int halved = p.gated ? 1 : 0, vectors = TILE_N / 8 >> halved;  // of a row
    for (int piece = thread_anew(); piece < M_TILE * vectors; piece += THREADS) {
        const int row = piece / vectors, column = piece % vectors * 8;
        const int m = tile.m0 + row, n = (tile.n0 >> halved) + column;
        if (m >= p.m || n >= p.n) continue;
        uint16_t* to = p.c + m * p.ldc + n;
        const uint16_t* from = shared + row * PITCH + column;
        if (aligned && n + 8 <= p.n) {
            *reinterpret_cast<Vec4*>(to) = *reinterpret_cast<const Vec4*>(from);
        } else {
            for (int i = 0; i < min(8, p.n - n); i++) to[i] = from[i];
        }
    }
    __syncthreads();
}

// ---- the kernel ----------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    marlin_gemm(const uint16_t* a, int64_t lda, const uint32_t* b, const uint16_t* scales, const uint16_t* zeros,
                const uint16_t* bias, uint16_t* c, int64_t ldc, int m, int n, int k, int padded_n, int padded_k, int gated,
                int split_tiles, int each, Float4* partials, uint32_t* counters) {
    extern __shared__ __align__(128) uint8_t smem[];
    const uint32_t stages = shared_address(smem);
    const Problem p = {a, lda, b, scales, zeros, bias, c, ldc, m, n, k, padded_n, padded_k, gated != 0};
    const Warp w;
    const int tiles = ((m + M_TILE - 1) / M_TILE) * ((padded_n + TILE_N - 1) / TILE_N);
    const int units = (padded_k + K_STAGE - 1) / K_STAGE;
    const Deal deal(split_tiles, units, each, tiles);

    Pieces pieces(deal);
    if (pieces.left(deal)) {
        const Piece piece = pieces.next(deal);
        prefetch_weights(p, tile_at<M_TILE, TILE_N>(piece.tile, m, padded_n), piece.first, piece.last);
    }
    wait_for_previous_grid();
    while (pieces.left(deal)) {
        const Piece piece = pieces.take(deal);
        const Tile tile = tile_at<M_TILE, TILE_N>(piece.tile, m, padded_n);
        Accumulators acc = {};
        run_units(acc, stages, p, tile, w, piece.first, piece.last);
        Owned own;
        sum_over_warps(own, acc, smem, w);
        if (piece.last - piece.first < units) {
            __shared__ uint32_t arrived;
            constexpr int FLIGHT = M_TILE < 64 ? 8 : 16;  // vectors of other blocks that a thread loads at once
            float(&sums)[PARTIAL][4] = *reinterpret_cast<float(*)[PARTIAL][4]>(&own);
            const Sharing sharing = deal.sharing(piece.tile);
            uint32_t* counter = counters + piece.tile;
            bool last = false;
            if (!pieces.dealt() && piece.ends_late(deal)) {
                if (threadIdx.x == 0) arrived = load_acquire(counter);
                __syncthreads();
                last = arrived == sharing.count - 1;
            }
            if (!hand_in<Block>(sums, arrived, partials, counter, deal, sharing, piece.tile, last)) continue;
            Float4* saved = reinterpret_cast<Float4*>(smem) + thread_anew();
            add_up<Block, FLIGHT>(sums, saved, partials, deal, sharing, piece.tile);
            __syncthreads();  // `saved` lies where the tile goes next
        }
        store_tile(own, smem, p, tile, w);
    }
}
