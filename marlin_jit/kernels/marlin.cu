// marlin_gemm: C[M, N] = A[M, K] @ W[K, N] (+ bias), W in the Marlin format, on tensor cores (mma.sync, sm_80 and up).
//
// What is computed. The transpose: C^T = W^T A^T, so that one 32-bit word of B is exactly one mma A fragment
// (16 columns n x 16 rows k) and activations are the B operand, eight rows m at a time. Weights become
// (q - 8) * scale + delta in the activation type; products are accumulated in float32.
//
// Who holds what. A block owns a tile of M_TILE rows x TILE_N = 64 * WARPS_N columns. Its warps stand in a grid:
// warp (wn, wk) takes the 64 columns of chunk wn and, in every stage, the wk-th share of the stage's k. Lane
// (g = lane / 4, t = lane % 4) holds for its chunk's four 16-column slabs j and every 8-row block mb
//     acc[j][mb][0..3] = C at (n = 16j+g, m = 8mb+2t), (same n, m+1), (n+8, m), (n+8, m+1).
//
// How work is cut. A unit is K_STAGE of one tile's k. The units of the first `split_tiles` tiles are dealt out evenly
// over the grid in order, so a block may begin and end inside a tile; the other tiles are whole, one after another.
// Of the blocks that share a tile the one that arrives last adds all their float32 partial sums, always in ascending
// k: the result does not depend on who was last, nobody waits, and the counter is left at zero.
//
// Build constants: BF16, M_TILE (16, 32, 64), WARPS_N, WARPS_K (1, 2, 4), K_STAGE (64, 128, 256), STAGES,
// GROUP (32, 64, 128; 0 = one group a column), ASYMMETRIC (0, 1), MIN_BLOCKS (blocks an SM, bounds the registers).
#include "layout.cuh"
#include "numeric.cuh"

constexpr int WARPS = WARPS_N * WARPS_K;
constexpr int THREADS = 32 * WARPS;
constexpr int TILE_N = 64 * WARPS_N;
constexpr int M_BLOCKS = M_TILE / 8;
constexpr int STEPS = K_STAGE / 16;          // k16 steps of a stage
constexpr int WARP_STEPS = STEPS / WARPS_K;  // of them, each warp's
constexpr int OWN = 4 / WARPS_K;             // slabs a warp finishes after the sum over wk
constexpr int SCALE_ROWS = GROUP == 0 ? 0 : (K_STAGE > GROUP ? K_STAGE / GROUP : 1);
static_assert(WARP_STEPS % 2 == 0, "fragments alternate between two register sets");

// A stage in shared memory: activations as K_STAGE/64 blocks of [M_TILE][64] whose 16-byte columns are XOR-swizzled by
// the row (so that ldmatrix meets no bank conflict), weights as [step][chunk][lane], then scales and delta rows.
constexpr int A_BYTES = M_TILE * K_STAGE * 2;
constexpr int W_BYTES = STEPS * WARPS_N * 512;
constexpr int S_BYTES = SCALE_ROWS * TILE_N * 2;
constexpr int W_AT = A_BYTES;
constexpr int S_AT = W_AT + W_BYTES;
constexpr int D_AT = S_AT + S_BYTES;
constexpr int STAGE_BYTES = D_AT + (ASYMMETRIC ? S_BYTES : 0);

struct Problem {
    const uint16_t* a;
    int64_t lda;
    const uint32_t* b;
    const uint16_t* scales;
    const uint16_t* delta;
    const uint16_t* bias;  // or null
    uint16_t* c;
    int64_t ldc;
    int m, n, k;
    int padded_n, padded_k;
};

struct Tile {
    int m0, n0;
};

// Tiles in bands of BAND m-tiles, m fastest: a wave of blocks then touches few rows of A and few columns of W.
constexpr int BAND = 16;
__device__ __forceinline__ Tile tile_at(int index, const Problem& p) {
    const int m_tiles = (p.m + M_TILE - 1) / M_TILE;
    const int n_tiles = (p.padded_n + TILE_N - 1) / TILE_N;
    const int band = index / (BAND * n_tiles);
    const int rest = index - band * BAND * n_tiles;
    const int rows = min(BAND, m_tiles - band * BAND);
    return {(band * BAND + rest % rows) * M_TILE, (rest / rows) * TILE_N};
}

// ---- global -> shared ---------------------------------------------------------------------------------------------

__device__ __forceinline__ void load_stage(uint32_t stage, const Problem& p, const Tile& tile, int unit) {
    const int thread = threadIdx.x;
    const int k0 = unit * K_STAGE;
#pragma unroll
    for (int i = 0; i < A_BYTES / 16; i += THREADS) {
        const int piece = i + thread;
        if (A_BYTES / 16 % THREADS != 0 && piece >= A_BYTES / 16) break;
        const int block = piece / (M_TILE * 8), row = piece / 8 % M_TILE, column = piece % 8;
        const int m = tile.m0 + row, k = k0 + block * 64 + column * 8;
        const int bytes = m < p.m ? max(0, min(16, (p.k - k) * 2)) : 0;
        const uint16_t* from = bytes > 0 ? p.a + m * p.lda + k : p.a;
        copy_async16(stage + block * (M_TILE * 128) + row * 128 + ((column ^ (row & 7)) << 4), from, bytes);
    }
#pragma unroll
    for (int i = 0; i < W_BYTES / 16; i += THREADS) {
        const int piece = i + thread;
        if (W_BYTES / 16 % THREADS != 0 && piece >= W_BYTES / 16) break;
        const int step = piece / (WARPS_N * 32), within = piece % (WARPS_N * 32);
        const int k16 = k0 / 16 + step;
        const bool inside = k16 < p.padded_k / 16 && tile.n0 + within * 2 < p.padded_n;
        const uint32_t* from = p.b + static_cast<int64_t>(k16) * (2 * p.padded_n) + 2 * tile.n0 + within * 4;
        copy_async16(stage + W_AT + piece * 16, inside ? from : p.b, inside ? 16 : 0);
    }
    if (GROUP != 0) {
        constexpr int PIECES = SCALE_ROWS * TILE_N / 8;
#pragma unroll
        for (int i = 0; i < PIECES; i += THREADS) {
            const int piece = i + thread;
            if (piece < PIECES) {
                const int row = piece / (TILE_N / 8), n = tile.n0 + piece % (TILE_N / 8) * 8;
                const int group = k0 / (GROUP == 0 ? 1 : GROUP) + row;
                const bool inside = n < p.padded_n && group * GROUP < p.padded_k;
                const int64_t at = inside ? static_cast<int64_t>(group) * p.padded_n + n : 0;
                copy_async16(stage + S_AT + piece * 16, p.scales + at, inside ? 16 : 0);
                if (ASYMMETRIC) copy_async16(stage + D_AT + piece * 16, p.delta + at, inside ? 16 : 0);
            }
        }
    }
}

// ---- shared -> registers -> tensor cores --------------------------------------------------------------------------

struct Warp {
    int lane, g, t, wn, wk;
    uint32_t a_at;  // this lane's ldmatrix address in a stage, at its warp's first step
    __device__ __forceinline__ Warp() {
        lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const int warp = threadIdx.x / 32;
        wn = warp % WARPS_N, wk = warp / WARPS_N;
        // Matrices in lane order: (m 0-7, k 0-7), (m 0-7, k 8-15), (m 8-15, k 0-7), (m 8-15, k 8-15).
        const int row = (lane & 7) + ((lane >> 4) << 3), column = (lane >> 3) & 1;
        const int first = wk * WARP_STEPS;
        a_at = (first / 4) * (M_TILE * 128) + row * 128 + ((column ^ (row & 7) ^ (2 * (first % 4))) << 4);
    }
};

struct Fragments {
    Vec4 words;                  // four slabs' words for one k16
    uint32_t b[M_TILE / 16][4];  // {b0, b1} of two 8-row blocks
};
struct Scales {  // component j: the pair (n = 16j+g, n + 8)
    Vec4 scale, delta;
};

__device__ __forceinline__ void fetch(Fragments& f, uint32_t stage, const Warp& w, int step) {
    f.words = load_shared16(stage + W_AT + (((w.wk * WARP_STEPS + step) * WARPS_N + w.wn) * 32 + w.lane) * 16);
#pragma unroll
    for (int i = 0; i < M_TILE / 16; i++)
        load_matrix4(f.b[i], stage + (step / 4) * (M_TILE * 128) + i * 2048 + (w.a_at ^ ((step % 4) << 5)));
}

__device__ __forceinline__ bool group_begins(int step) { return GROUP != 0 && (step == 0 || step * 16 % GROUP == 0); }

__device__ __forceinline__ void fetch_scales(Scales& s, uint32_t stage, const Warp& w, int step) {
    const int row = SCALE_ROWS > 1 ? (w.wk * WARP_STEPS + step) * 16 / (GROUP == 0 ? 1 : GROUP) : 0;
    const uint32_t at = row * TILE_N * 2 + w.wn * 128 + w.g * 16;
    s.scale = load_shared16(stage + S_AT + at);
    if (ASYMMETRIC) s.delta = load_shared16(stage + D_AT + at);
}

// One group a column: read once a tile, straight from global memory.
__device__ __forceinline__ Vec4 column_pairs(const uint16_t* row, const Problem& p, const Tile& tile, const Warp& w) {
    const int n = tile.n0 + w.wn * 64;
    uint32_t pair[4] = {};
    if (n < p.padded_n) slab_pairs(pair, row + n, w.g, true);
    return {pair[0], pair[1], pair[2], pair[3]};
}

using Accumulators = float[4][M_BLOCKS][4];

__device__ __forceinline__ void multiply(Accumulators& acc, const Fragments& f, const Scales& s) {
    const uint32_t words[4] = {f.words.x, f.words.y, f.words.z, f.words.w};
    const uint32_t scale[4] = {s.scale.x, s.scale.y, s.scale.z, s.scale.w};
    const uint32_t delta[4] = {s.delta.x, s.delta.y, s.delta.z, s.delta.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t a[4];
        Type::centered(a, words[j]);
#pragma unroll
        for (int r = 0; r < 4; r++) {  // fragment registers 0 and 2 are row n = g, 1 and 3 are n = g + 8
            const uint32_t by = r % 2 ? broadcast_high(scale[j]) : broadcast_low(scale[j]);
            if (ASYMMETRIC)
                a[r] = Type::fma(a[r], by, r % 2 ? broadcast_high(delta[j]) : broadcast_low(delta[j]));
            else
                a[r] = Type::mul(a[r], by);
        }
#pragma unroll
        for (int mb = 0; mb < M_BLOCKS; mb++)
            Type::mma(acc[j][mb], a, f.b[mb / 2][mb % 2 * 2], f.b[mb / 2][mb % 2 * 2 + 1]);
    }
}

// Adds units [first, last) of a tile to acc. Fragments of the next step are fetched before the current step is
// multiplied; a slot is refilled as soon as its last fragments are in registers.
__device__ __forceinline__ void run_units(Accumulators& acc, uint32_t smem, const Problem& p, const Tile& tile,
                                          const Warp& w, int first, int last) {
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
        if (first + s < last) load_stage(smem + s * STAGE_BYTES, p, tile, first + s);
        copy_commit();
    }
    Fragments f[2];
    Scales scales[2];
    if (GROUP == 0) {
        scales[0].scale = column_pairs(p.scales, p, tile, w);
        if (ASYMMETRIC) scales[0].delta = column_pairs(p.delta, p, tile, w);
    }
    copy_wait<STAGES - 1>();
    __syncthreads();
    uint32_t stage = smem;
    fetch(f[0], stage, w, 0);
    if (GROUP != 0) fetch_scales(scales[0], stage, w, 0);
    int slot = 0;
    for (int unit = first; unit < last; unit++) {
#pragma unroll
        for (int step = 0; step < WARP_STEPS; step++) {
            Scales next = scales[0];
            if (step + 1 < WARP_STEPS) {
                fetch(f[(step + 1) % 2], stage, w, step + 1);
                if (group_begins(step + 1)) fetch_scales(next, stage, w, step + 1);
            } else {
                copy_wait<STAGES - 2>();
                __syncthreads();
                if (unit + STAGES < last) load_stage(stage, p, tile, unit + STAGES);
                copy_commit();
                slot = slot + 1 == STAGES ? 0 : slot + 1;
                stage = smem + slot * STAGE_BYTES;
                fetch(f[(step + 1) % 2], stage, w, 0);
                if (GROUP != 0) fetch_scales(next, stage, w, 0);
            }
            multiply(acc, f[step % 2], scales[0]);
            scales[0] = next;
        }
    }
    copy_wait<0>();
    __syncthreads();
}

// ---- sums over warps and over blocks -------------------------------------------------------------------------------

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

// The units [0, total) cut into gridDim.x runs whose lengths differ by at most one.
struct Deal {
    int share, extra;
    __device__ __forceinline__ explicit Deal(int total) : share(total / gridDim.x), extra(total % gridDim.x) {}
    __device__ __forceinline__ int begin(int block) const { return block * share + min(block, extra); }
    __device__ __forceinline__ int owner(int unit) const {
        const int large = extra * (share + 1);
        return unit < large ? unit / (share + 1) : extra + (unit - large) / share;
    }
};

constexpr int PARTIAL = OWN * M_BLOCKS;  // Float4s a thread
// A block has two slots: for the tile it begins in, and for the one it ends in.
__device__ __forceinline__ Float4* slot_of(Float4* partials, const Deal& deal, int block, int tile, int units) {
    const int which = deal.begin(block) / units == tile ? 0 : 1;
    return partials + static_cast<int64_t>(2 * block + which) * PARTIAL * THREADS + threadIdx.x;
}

// Publishes this block's partial sums of a split tile. True for the last block to arrive, whose `own` is then the sum.
__device__ __forceinline__ bool sum_over_blocks(Owned& own, Float4* partials, uint32_t* counters, const Deal& deal,
                                                int tile, int units) {
    __shared__ uint32_t arrived;
    const int from = deal.owner(tile * units), to = deal.owner((tile + 1) * units - 1);
    float(&flat)[PARTIAL][4] = *reinterpret_cast<float(*)[PARTIAL][4]>(&own);
    Float4* mine = slot_of(partials, deal, blockIdx.x, tile, units);
#pragma unroll
    for (int i = 0; i < PARTIAL; i++) mine[i * THREADS] = {flat[i][0], flat[i][1], flat[i][2], flat[i][3]};
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        arrived = atomicAdd(counters + tile, 1u);
        if (arrived == to - from) counters[tile] = 0;
    }
    __syncthreads();
    const bool last = arrived == to - from;
    __syncthreads();  // `arrived` is written again by the next tile
    if (!last) return false;
    __threadfence();
#pragma unroll
    for (int i = 0; i < PARTIAL; i++) flat[i][0] = flat[i][1] = flat[i][2] = flat[i][3] = 0.f;
    for (int block = from; block <= to; block++) {
        const Float4* slot = slot_of(partials, deal, block, tile, units);
        constexpr int BATCH = PARTIAL < 16 ? PARTIAL : 16;
#pragma unroll
        for (int first = 0; first < PARTIAL; first += BATCH) {
            Float4 v[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++) v[i] = load_l2(slot + (first + i) * THREADS);
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                flat[first + i][0] += v[i].x, flat[first + i][1] += v[i].y;
                flat[first + i][2] += v[i].z, flat[first + i][3] += v[i].w;
            }
        }
    }
    return true;
}

// ---- registers -> global -------------------------------------------------------------------------------------------

// Rounds once, turns the transposed fragments by movmatrix, and leaves through shared memory as 16-byte rows.
__device__ __forceinline__ void store_tile(const Owned& own, uint8_t* smem, const Problem& p, const Tile& tile,
                                           const Warp& w) {
    constexpr int PITCH = TILE_N + 8;  // elements; the odd 16 bytes spread rows over the banks
    uint16_t* shared = reinterpret_cast<uint16_t*>(smem);
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
    __syncthreads();
    const bool aligned = ((reinterpret_cast<uint64_t>(p.c) | (p.ldc * 2)) & 15) == 0;
    for (int piece = threadIdx.x; piece < M_TILE * TILE_N / 8; piece += THREADS) {
        const int row = piece / (TILE_N / 8), column = piece % (TILE_N / 8) * 8;
        const int m = tile.m0 + row, n = tile.n0 + column;
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
    marlin_gemm(const uint16_t* a, int64_t lda, const uint32_t* b, const uint16_t* scales, const uint16_t* delta,
                const uint16_t* bias, uint16_t* c, int64_t ldc, int m, int n, int k, int padded_n, int padded_k,
                int split_tiles, Float4* partials, uint32_t* counters) {
    extern __shared__ __align__(128) uint8_t smem[];
    const uint32_t stages = shared_address(smem);
    const Problem p = {a, lda, b, scales, delta, bias, c, ldc, m, n, k, padded_n, padded_k};
    const Warp w;
    const int tiles = ((m + M_TILE - 1) / M_TILE) * ((padded_n + TILE_N - 1) / TILE_N);
    const int units = (padded_k + K_STAGE - 1) / K_STAGE;
    const Deal deal(split_tiles * units);

    // First this block's run of the split tiles' units, then whole tiles at a stride of the grid.
    int unit = deal.begin(blockIdx.x);
    const int unit_end = deal.begin(blockIdx.x + 1);
    int index = split_tiles + blockIdx.x;
    while (unit < unit_end || index < tiles) {
        const bool dealt = unit < unit_end;
        const int current = dealt ? unit / units : index;
        const int first = dealt ? unit - current * units : 0;
        const int last = dealt ? min(units, first + unit_end - unit) : units;
        if (dealt)
            unit += last - first;
        else
            index += gridDim.x;

        const Tile tile = tile_at(current, p);
        Accumulators acc = {};
        run_units(acc, stages, p, tile, w, first, last);
        Owned own;
        sum_over_warps(own, acc, smem, w);
        if (last - first < units && !sum_over_blocks(own, partials, counters, deal, current, units)) continue;
        store_tile(own, smem, p, tile, w);
    }
}
