// marlin_wgmma: C[M, N] = A[M, K] @ W[K, N] (+ bias), W in the Marlin format, on Hopper's tensor cores (wgmma, sm_90a).
// With `gated`, C[M, N] = silu(A @ gate) * (A @ up), as in marlin.cu.
//
// What is computed. The transpose, with the weights of marlin.cu: C^T = W^T A^T. W, unpacked in registers, is the A
// operand of wgmma, and activations are the B operand, straight from shared memory. Sums are float32.
//
// Who holds what. A block owns a tile of M_TILE rows x TILE_N = 64 * J * WG_N columns. Two warpgroups consume: they
// stand in a grid, where (wn, wk) takes 64 * J columns and, in every stage, the wk-th share of the stage's k. Warp w of
// one takes 16 * J columns, as J slabs of 16, each the warp's rows of one wgmma: J neighbouring words of a lane's vector of
// B. Lane (g = lane / 4, t = lane % 4) holds for slab j and 8-row block mb
//     acc[j][mb][0..3] = C at (n = 16j+g, m = 8mb+2t), (same n, m+1), (n+8, m), (n+8, m+1)
// from the first slab's column on. Which slab that is turns with g: see Warp.
// One lane of the third warpgroup produces: it copies stages into a ring of shared memory, as boxes of tensor maps.
//
// How they meet. A stage's full barrier counts its bytes, its empty barrier an arrival of every consumer warp. While
// the tensor cores multiply PER k16 steps, the next ones' weights are unpacked. The producer runs ahead. Between pieces of
// work sums and outputs pass through the ring's first slots: those the producer fills only when that is over (idle
// barrier); where outputs have a place of their own, sums that blocks share alone. A block's first weights are asked for
// while the grid before it may still work, its activations not.
//
// How work is cut. A unit is K_STAGE of one tile's k; tiles.cuh says which block takes which units, and how those that
// share a tile add up. PAIRS: a cluster of two stands for a block there, and gets exactly one piece of one tile. Each of the
// two multiplies half of its units; then they exchange halves of the rows through shared memory, and each goes on with its
// half.
//
// Build constants: BF16, M_TILE (16, 24, 32, 48, 64, 96, 128), J (1, 2), WG_N, WG_K (1, 2: one of them 2), K_STAGE (128,
// 256), STAGES, GROUP (32, 64, 128; 0 = one group a column), ZEROS (0 = symmetric, 1 = deltas, 2 = zero points),
// MIN_BLOCKS (1, 2: blocks an SM, bounds the registers), APART (the output has shared memory of its own), PAIRS.
#include "hopper.cuh"
#include "layout.cuh"
#include "tiles.cuh"
#include "weigh.cuh"

constexpr int CONSUMERS = 128 * WG_N * WG_K;  // threads, the block's first
constexpr int TILE_N = 64 * J * WG_N;
constexpr int M_BLOCKS = M_TILE / 8;
constexpr int STEPS = K_STAGE / 16;          // k16 steps of a stage
constexpr int WG_STEPS = STEPS / WG_K;       // of them, each warpgroup's
constexpr int OWN = J / WG_K;                // slabs a warpgroup finishes after the sum over wk
constexpr int END_BLOCKS = PAIRS ? M_BLOCKS / 2 : M_BLOCKS;  // of eight rows, that a block finishes
constexpr int END_ROWS = 8 * END_BLOCKS;
static_assert(!PAIRS || (M_BLOCKS % 2 == 0 && OWN == 1 && !APART), "pairs exchange half of one slab's rows in the ring");
static_assert(WG_K <= 2, "two sums have one order");

// Stages whose weights are asked for while the grid before may still work. The first activations queue behind them, so that
// more of them (a whole ring of six or eight) cost up to 1 us.
constexpr int EARLY = M_TILE > 32 && K_STAGE == 256 ? 1 : 2;
static_assert(EARLY <= STAGES, "they fit the ring");

// Codes may be multiplied as they are, exactly, and a group's float32 sums scaled: M_TILE / 2 fma a slab and group, where
// scaling the weights takes 4 slower multiplications a slab and step. It takes a second set of sums. Deltas are added
// to weights.
constexpr bool SCALES_SUMS =
    ZEROS != 1 && (GROUP == 0 || (M_TILE * 2 <= GROUP && WG_STEPS * 16 % GROUP == 0));
constexpr bool GROUP_SUMS = SCALES_SUMS && GROUP != 0;

// k16 steps between two waits: two where few rows make products short, there are registers, and what is fetched ahead
// begins no other group.
constexpr int PER = M_TILE > 64 || (GROUP_SUMS && (GROUP == 32 || M_TILE == 32)) ? 1 : 2;
static_assert(WG_STEPS % (2 * PER) == 0, "weights alternate between two register sets");
static_assert(J % WG_K == 0, "whole slabs are exchanged");

// One lane copies, but a whole warpgroup can pass its registers on to the consumers (a lone warp would keep its share,
// and registers are given out as if to whole warpgroups).
constexpr int THREADS = CONSUMERS + 128;
constexpr int PRODUCER_REGISTERS = MIN_BLOCKS == 1 ? 40 : 24;
constexpr int CONSUMER_REGISTERS = MIN_BLOCKS == 1 ? 232 : 104;
static_assert(CONSUMERS == 256 && MIN_BLOCKS <= 2, "registers are shared out among three warpgroups");

// A stage: activations as K_STAGE/64 boxes of [M_TILE][64], swizzled as wgmma reads them; weights as vectors of four
// words, [step][chunk][lane]; rows of scales and zeros.
constexpr int GROUP_K = GROUP == 0 ? 1 : GROUP;
constexpr int SCALE_ROWS = GROUP == 0 ? 0 : (K_STAGE > GROUP ? K_STAGE / GROUP_K : 1);
constexpr int BOX_BYTES = M_TILE * 128;
constexpr int A_BYTES = M_TILE * K_STAGE * 2;
constexpr int W_ROW = TILE_N * 8;
constexpr int S_ROW = TILE_N * 2;
constexpr int S_BYTES = SCALE_ROWS * S_ROW;
constexpr int W_AT = A_BYTES;
constexpr int S_AT = W_AT + STEPS * W_ROW;
constexpr int Z_AT = S_AT + S_BYTES;
constexpr int COPIED_BYTES = Z_AT + (ZEROS ? S_BYTES : 0);
constexpr int STAGE_BYTES = (COPIED_BYTES + 1023) / 1024 * 1024;  // swizzled boxes begin on multiples of 1024

// At the end of a tile: sums that are exchanged or wait, in the ring, then the output as rows, of each wn's columns by
// themselves. APART: the output is behind the ring, which the end of a tile needs only where blocks share it: otherwise
// copies for the next tile go on.
constexpr int SUMS_BYTES = M_TILE * TILE_N * 4, OUTPUT_BYTES = END_ROWS * TILE_N * 2;
constexpr int RING_BYTES = STAGES * STAGE_BYTES;
constexpr int OUTPUT_AT = APART ? RING_BYTES : SUMS_BYTES + OUTPUT_BYTES <= RING_BYTES ? SUMS_BYTES : 0;
constexpr int END_BYTES = OUTPUT_AT + OUTPUT_BYTES > SUMS_BYTES ? OUTPUT_AT + OUTPUT_BYTES : SUMS_BYTES;
constexpr int END_SLOTS = APART ? STAGES : (END_BYTES + STAGE_BYTES - 1) / STAGE_BYTES;
static_assert(END_SLOTS <= STAGES && SUMS_BYTES <= RING_BYTES, "the end of a tile fits");
static_assert(!APART || WG_K == 1, "sums over warpgroups pass through the ring");

// Other blocks' sums are fetched behind this one's, BATCH of a thread's vectors of a block at once.
constexpr int PARTIAL = OWN * END_BLOCKS;     // Float4s a thread
constexpr int VECTOR_BYTES = CONSUMERS * 16;  // one of every thread
constexpr int ROOM = ((APART ? END_BYTES : END_SLOTS * STAGE_BYTES) - SUMS_BYTES) / VECTOR_BYTES;
constexpr int BATCH = ROOM >= PARTIAL ? PARTIAL : ROOM >= PARTIAL / 2 ? PARTIAL / 2 : PARTIAL / 8;
static_assert(BATCH <= ROOM && PARTIAL % BATCH == 0, "whole batches fit");

// Behind the ring (and the output): the barriers, and the words by which sums over blocks agree who is last.
constexpr int FULL_AT = APART ? END_BYTES : RING_BYTES;
constexpr int EMPTY_AT = FULL_AT + STAGES * 8;
constexpr int IDLE_AT = EMPTY_AT + STAGES * 8;
constexpr int TELL_AT = IDLE_AT + 8;
constexpr int ARRIVED_AT = TELL_AT + 8;
constexpr int TOLD_AT = ARRIVED_AT + 4;
struct Told {
    Sharing sharing;
    uint32_t last;
};
struct Maps {
    const TensorMap *a, *w, *scales, *zeros;
};

struct Problem {
    const uint16_t *scales, *zeros;  // as in marlin.cu; used where there is one group a column
    const uint16_t* bias;            // or null
    uint16_t* c;
    int64_t ldc;
    int m, n, padded_n;
    bool gated;
};

// A place in the ring, and the parity of the phase that its full barrier is in.
struct Place {
    int slot = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance() {
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        if (slot == 0) parity ^= 1;
    }
    __device__ __forceinline__ Place before() const {
        return slot == 0 ? Place{STAGES - 1, parity ^ 1} : Place{slot - 1, parity};
    }
    __device__ __forceinline__ uint32_t stage(uint32_t ring) const { return ring + slot * STAGE_BYTES; }
    __device__ __forceinline__ uint32_t full(uint32_t ring) const { return ring + FULL_AT + slot * 8; }
    __device__ __forceinline__ uint32_t empty(uint32_t ring) const { return ring + EMPTY_AT + slot * 8; }
};

// Few rows take little time, in which the divisions of tile_at would be seen.
__device__ __forceinline__ Tile place_of(int tile, const Problem& p) {
    return p.m <= M_TILE ? Tile{0, tile * TILE_N} : tile_at<M_TILE, TILE_N>(tile, p.m, p.padded_n);
}

// The first of the rows that a tile multiplies. Where its last ones would not exist (copies take longer for rows out of
// bounds than for others) it begins sooner, if it can: what belongs to the tile before is then not stored.
__device__ __forceinline__ int first_row(const Tile& tile, const Problem& p) { return max(0, min(tile.m0, p.m - M_TILE)); }

// PAIRS: of a pair's piece, the units of this block.
__device__ __forceinline__ Piece own_units(const Piece& piece) {
    const int middle = (piece.first + piece.last + 1) / 2;
    if (!PAIRS) return piece;
    return blockIdx.y == 0 ? Piece{piece.tile, piece.first, middle} : Piece{piece.tile, middle, piece.last};
}

// Which counter counts the blocks that hand in sums: of a tile, or (PAIRS) of the half of its rows that this block finishes.
__device__ __forceinline__ uint32_t counter_of(int tile) { return PAIRS ? 2 * tile + blockIdx.y : tile; }

// ---- global -> shared: the producer --------------------------------------------------------------------------------

__device__ __forceinline__ void copy_weights(uint32_t ring, const Place& at, const Maps& maps, const Tile& tile,
                                             int unit) {
    if (!elected()) return;
    const uint32_t stage = at.stage(ring), full = at.full(ring);
    barrier_expect(full, COPIED_BYTES);
    copy_box(stage + W_AT, maps.w, tile.n0, unit * STEPS, full);
    if (GROUP != 0) {
        const int row = unit * K_STAGE / GROUP_K;
        copy_box(stage + S_AT, maps.scales, tile.n0, row, full);
        if (ZEROS) copy_box(stage + Z_AT, maps.zeros, tile.n0, row, full);
    }
}
__device__ __forceinline__ void copy_activations(uint32_t ring, const Place& at, const Maps& maps, int row, int unit) {
    if (!elected()) return;
#pragma unroll
    for (int box = 0; box < K_STAGE / 64; box++)
        copy_box(at.stage(ring) + box * BOX_BYTES, maps.a, unit * K_STAGE + box * 64, row, at.full(ring));
}

__device__ __forceinline__ void prefetch(const Maps& maps) {
    if (!elected()) return;
    prefetch_map(maps.w);
    if (GROUP != 0) {
        prefetch_map(maps.scales);
        if (ZEROS) prefetch_map(maps.zeros);
    }
    prefetch_map(maps.a);
}

// Who shares the tile of a piece, and, where the others may be done, whether they are: for the consumers, who have no
// registers to spare for that. The producer looks when the last stage has come, so its answer waits for them.
__device__ __forceinline__ void tell(uint8_t* smem, const Place& last, const Piece& piece, const Pieces& pieces,
                                     const Deal& deal, const uint32_t* counters) {
    const uint32_t ring = shared_address(smem);
    const Sharing sharing = deal.sharing(piece.tile);
    barrier_wait(last.full(ring), last.parity);
    if (!elected()) return;
    Told& told = *reinterpret_cast<Told*>(smem + TOLD_AT);
    told.sharing = sharing;
    const bool look = !pieces.dealt() && piece.ends_late(deal);
    told.last = look && load_acquire(counters + counter_of(piece.tile)) == sharing.count - 1;
    barrier_arrive(ring + TELL_AT);
}

// Everything that one block's consumers will want, in their order.
__device__ __forceinline__ void produce(uint8_t* smem, const Maps& maps, const Problem& p, const Deal& deal,
                                        const uint32_t* counters) {
    const uint32_t ring = shared_address(smem);
    Pieces pieces(deal);
    Place at;
    uint32_t idle_parity = 0;
    bool begun = false, leaving = false;  // leaving: the end of the piece before may need the ring
#pragma unroll 1
    while (pieces.left(deal)) {
        const Piece piece = pieces.take(deal);
        const Tile tile = place_of(piece.tile, p);
        const int row = first_row(tile, p), last = own_units(piece).last;
        int unit = own_units(piece).first;
        if (!begun) {
            const int filled = min(last, unit + EARLY);
            Place first = at;
#pragma unroll 1
            for (int i = unit; i < filled; i++, first.advance()) copy_weights(ring, first, maps, tile, i);
            wait_for_previous_grid();
#pragma unroll 1
            for (; unit < filled; unit++, at.advance()) copy_activations(ring, at, maps, row, unit);
            begun = true;
        }
#pragma unroll 1
        for (; unit < last; unit++, at.advance()) {
            // Before the last unit at any rate: the consumers' next end must not come before this one is waited for.
            if (leaving && (at.slot < END_SLOTS || unit + 1 == last)) {
                barrier_wait(ring + IDLE_AT, idle_parity);
                idle_parity ^= 1, leaving = false;
            }
            barrier_wait(at.empty(ring), at.parity ^ 1);
            copy_weights(ring, at, maps, tile, unit);
            copy_activations(ring, at, maps, row, unit);
        }
        const bool shares = piece.last - piece.first < deal.units;
        if (shares) tell(smem, at.before(), piece, pieces, deal, counters);
        leaving = shares || !APART;
    }
}

// ---- shared -> registers -> tensor cores: the consumers ------------------------------------------------------------

struct Warp {
    int lane, g, wn, wk, chunk, slab;
    uint32_t a_at, w_at, s_at;  // in a stage, at its warpgroup's first step: activations, this lane's words and scales
    // Of its chunk's four slabs of 16 columns, the one whose columns g and g + 8 are rows g and g + 8 of the warp's first
    // A operand. Were it the same for all g, lanes would meet in the banks of the same word of every vector.
    __device__ __forceinline__ int slab_of(int g) const { return (slab + g / 2 * J) % 4; }
    // Where that slab begins in the tile; and where the first does that the warp finishes.
    __device__ __forceinline__ int column(int g) const { return chunk * 64 + slab_of(g) * 16; }
    __device__ __forceinline__ int own_column(int g) const { return column(g) + wk * (16 * OWN); }
    // The place of that slab among those of its wn's columns.
    __device__ __forceinline__ int own_slab() const { return (chunk - wn * J) * 4 + slab + wk * OWN; }
    __device__ __forceinline__ explicit Warp(int warp) {
        const int warpgroup = warp / 4;
        lane = threadIdx.x % 32, g = lane / 4, wn = warpgroup % WG_N, wk = warpgroup / WG_N;
        const int tile_slab = (wn * 4 + warp % 4) * J;
        chunk = tile_slab / 4, slab = tile_slab % 4;
        const int word = slab_of(g), first = wk * WG_STEPS;
        constexpr int SHARE_ROWS = WG_STEPS * 16 / (GROUP == 0 ? 1024 : GROUP);  // of scales, in a share of k
        a_at = first / 4 * BOX_BYTES + first % 4 * 32;
        w_at = W_AT + first * W_ROW + chunk * 512 + lane * 16 + word * 4;
        s_at = S_AT + wk * (SHARE_ROWS * S_ROW) + chunk * 128 + g * 16 + word * 4;
    }
};

using Accumulators = float[J][M_BLOCKS][4];
using Slab = float[M_BLOCKS * 4];  // one slab's, as `product` takes them
__device__ __forceinline__ Slab& slab(Accumulators& acc, int j) { return *reinterpret_cast<Slab*>(&acc[j]); }

struct Fetched {
    uint32_t words[PER][J];
    Scales<J> scales;
};

__device__ constexpr bool group_begins(int step) { return GROUP != 0 && (step == 0 || step * 16 % GROUP_K == 0); }
__device__ constexpr bool group_ends(int step) { return GROUP != 0 && (step + 1) * 16 % GROUP_K == 0; }

// The words of PER steps, and scales where they begin a group or a stage.
__device__ __forceinline__ void fetch(Fetched& f, uint32_t stage, const Warp& w, int step) {
#pragma unroll
    for (int i = 0; i < PER; i++) load_shared(f.words[i], stage + w.w_at + (step + i) * W_ROW);
    if (group_begins(step)) {
        const uint32_t from = stage + w.s_at + step * 16 / GROUP_K * S_ROW;
        uint32_t zeros[J] = {};
        load_shared(f.scales.scale, from);
        if (ZEROS) load_shared(zeros, from + S_BYTES);
        f.scales.set_zeros(zeros);
    }
}

// One group a column: read once a piece, straight from global memory.
__device__ __forceinline__ void column_scales(Scales<J>& s, const Problem& p, const Tile& tile, const Warp& w) {
    uint32_t zeros[J] = {};
#pragma unroll
    for (int j = 0; j < J; j++) {
        const int at = scale_position(min(tile.n0 + w.column(w.g), p.padded_n - 16 * J) + 16 * j + w.g, true);
        s.scale[j] = p.scales[at] | static_cast<uint32_t>(p.scales[at + 2]) << 16;
        if (ZEROS) zeros[j] = p.zeros[at] | static_cast<uint32_t>(p.zeros[at + 2]) << 16;
    }
    s.set_zeros(zeros);
}

using Weights = uint32_t[2][PER][J][4];  // of these steps and the next

__device__ __forceinline__ void weigh_words(Weights& a, int set, const Fetched& f) {
#pragma unroll
    for (int i = 0; i < PER; i++)
#pragma unroll
        for (int j = 0; j < J; j++) {
            uint32_t(&to)[4] = a[set][i][j];
            if (!SCALES_SUMS)
                weigh_word(to, f.words[i][j], f.scales, j);
            else if (ZEROS == 2)
                shifted(to, f.words[i][j], f.scales.zero[j]);
            else
                centered(to, f.words[i][j]);
        }
}

// acc += scale * sum, or acc *= scale where there is one group.
__device__ __forceinline__ void add_scaled(Accumulators& acc, const Accumulators& sum, const uint32_t (&pairs)[J]) {
#pragma unroll
    for (int j = 0; j < J; j++) {
        const float low = Type::to_float(pairs[j] & 0xffff), high = Type::to_float(pairs[j] >> 16);
#pragma unroll
        for (int mb = 0; mb < M_BLOCKS; mb++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[j][mb][i] = (i < 2 ? low : high) * sum[j][mb][i] + (GROUP == 0 ? 0.f : acc[j][mb][i]);
    }
}

// What a warp knows of a unit that it works on.
struct Unit {
    uint32_t stage, next_stage, next_full, next_parity;
    uint32_t read;  // empty barrier of the stage before
    bool first, last;
};

// A warp's sums: of a group and, scaled, of all; or, where weights are scaled or there is one group, of all.
struct Totals {
    Accumulators all, group;
    // Those that products are added to.
    __device__ __forceinline__ Accumulators& open() { return GROUP_SUMS ? group : all; }
};
__device__ __forceinline__ void hold_all(Accumulators& sums) {
#pragma unroll
    for (int j = 0; j < J; j++) hold(slab(sums, j));
}

// How many times PER steps before they are unpacked words are asked for. Two hide shared memory, but wait for a stage
// sooner.
constexpr int AHEAD = SCALES_SUMS && ZEROS == 0 ? 1 : 2;

// The words of PER steps from STEP on, counted from a unit's first, on into the next unit.
template <int STEP>
__device__ __forceinline__ void fetch_ahead(Fetched& f, const Unit& unit, const Warp& w) {
    if constexpr (STEP < WG_STEPS) {
        fetch(f, unit.stage, w, STEP);
    } else {
        if (STEP == WG_STEPS) barrier_wait(unit.next_full, unit.next_parity, !unit.last);
        fetch(f, unit.next_stage, w, STEP - WG_STEPS);
    }
}

template <int STEP>
__device__ __forceinline__ void multiply_step(Totals& sums, const uint32_t (&a)[J][4], uint64_t operand) {
    constexpr int FURTHER = STEP / 4 * BOX_BYTES + STEP % 4 * 32;
#pragma unroll
    for (int j = 0; j < J; j++)
        product<GROUP_SUMS && group_begins(STEP)>(slab(sums.open(), j), a[j], operand + FURTHER / 16);
}

// Multiplies a unit's steps from STEP on; then the weights of the next unit's first steps are ready. (The compiler does
// not unroll a plain loop in all builds.)
template <int STEP>
__device__ __forceinline__ void multiply(Totals& sums, Weights& a, Fetched& f, const Unit& unit, const Warp& w,
                                         uint32_t (&scale)[J]) {
    constexpr int SET = STEP / PER % 2;
    const uint64_t operand = operand_at(unit.stage + w.a_at);
    if (GROUP_SUMS && group_begins(STEP))
#pragma unroll
        for (int j = 0; j < J; j++) scale[j] = f.scales.scale[j];
#pragma unroll
    for (int i = 0; i < PER * J; i++) hold(a[SET][i / J][i % J]);
    products_fence();
    multiply_step<STEP>(sums, a[SET][0], operand);
    if (PER == 2) multiply_step<STEP + 1>(sums, a[SET][PER - 1], operand);
    products_commit();
    if (AHEAD == 1) fetch_ahead<STEP + PER>(f, unit, w);
    products_wait<1>();
    if (STEP == 0 && !unit.first && w.lane == 0) barrier_arrive(unit.read);
    weigh_words(a, 1 - SET, f);
    if (AHEAD == 2) fetch_ahead<STEP + 2 * PER>(f, unit, w);
    if constexpr (GROUP_SUMS && group_ends(STEP + PER - 1)) {
        products_wait<0>();
        hold_all(sums.open());
        add_scaled(sums.all, sums.open(), scale);
    }
    if constexpr (STEP + PER < WG_STEPS) multiply<STEP + PER>(sums, a, f, unit, w, scale);
}

// The sums of a number of units, from place `at` of the ring on.
__device__ __forceinline__ void run_units(Totals& sums, Fetched& f, uint32_t ring, Place& at, const Warp& w, int units) {
    Weights a;
    uint32_t scale[J];
    barrier_wait(at.full(ring), at.parity);
    fetch(f, at.stage(ring), w, 0);
    weigh_words(a, 0, f);
    if (AHEAD == 2) fetch(f, at.stage(ring), w, PER);
    hold_all(sums.open());
    uint32_t read = 0;
#pragma unroll 1
    for (int left = units; left > 0; left--) {
        const uint32_t stage = at.stage(ring), empty = at.empty(ring);
        at.advance();
        multiply<0>(sums, a, f, {stage, at.stage(ring), at.full(ring), at.parity, read, left == units, left == 1}, w, scale);
        read = empty;
    }
    products_wait<0>();
    hold_all(sums.open());
    if (w.lane == 0) barrier_arrive(read);
}

// ---- sums over warpgroups ------------------------------------------------------------------------------------------

struct Consumers {
    static constexpr int COUNT = CONSUMERS;
    static __device__ __forceinline__ void sync() { sync_first<CONSUMERS>(); }
};

using Owned = float[OWN][M_BLOCKS][4];

// Where a thread leaves the vectors that its partner in the other warpgroup reads, and where that one's for it are.
// Once read the latter place is only this thread's.
__device__ __forceinline__ Float4* given(uint8_t* smem, int thread) { return reinterpret_cast<Float4*>(smem) + thread; }
__device__ __forceinline__ Float4* taken(uint8_t* smem, int thread) {
    return reinterpret_cast<Float4*>(smem) + (WG_K == 1 ? thread : thread ^ (128 * WG_N));
}

// Adds the WG_K partial sums; warpgroup wk keeps slabs [wk * OWN, (wk + 1) * OWN).
__device__ __forceinline__ void sum_over_warpgroups(Owned& own, const Accumulators& acc, uint8_t* smem, const Warp& w) {
    if (!APART) Consumers::sync();  // the ring is read, and may be written
    if constexpr (WG_K == 1) {
#pragma unroll
        for (int i = 0; i < J * M_BLOCKS * 4; i++) (&own[0][0][0])[i] = (&acc[0][0][0])[i];
    } else {
        const int thread = thread_anew();
        Float4 *give = given(smem, thread), *take = taken(smem, thread);
#pragma unroll
        for (int j = 0; j < OWN; j++)
#pragma unroll
            for (int mb = 0; mb < M_BLOCKS; mb++) {
                const float (&low)[4] = acc[j][mb], (&high)[4] = acc[OWN + j][mb];
                float other[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    other[i] = w.wk == 0 ? high[i] : low[i];
                    own[j][mb][i] = w.wk == 0 ? low[i] : high[i];
                }
                give[(j * M_BLOCKS + mb) * CONSUMERS] = {other[0], other[1], other[2], other[3]};
            }
        Consumers::sync();
#pragma unroll
        for (int j = 0; j < OWN; j++)
#pragma unroll
            for (int mb = 0; mb < M_BLOCKS; mb++) {
                const Float4 v = take[(j * M_BLOCKS + mb) * CONSUMERS];
                own[j][mb][0] += v.x, own[j][mb][1] += v.y, own[j][mb][2] += v.z, own[j][mb][3] += v.w;
            }
    }
}

// ---- sums over blocks ----------------------------------------------------------------------------------------------

// The sums of all blocks that share a tile, in the last of them, in ascending k. Its own wait in shared memory for their
// turn. Each thread fetches what it adds; `bytes` of the ring may be used.
__device__ __forceinline__ void add_up(float (&sums)[PARTIAL][4], uint8_t* smem, int bytes, Float4* partials,
                                       const Deal& deal, const Sharing& sharing, int tile) {
    const int thread = thread_anew(), room = (bytes - SUMS_BYTES) / (BATCH * VECTOR_BYTES);
    Float4* saved = taken(smem, thread);
    Float4* fetched = reinterpret_cast<Float4*>(smem + SUMS_BYTES) + thread;
#pragma unroll
    for (int i = 0; i < PARTIAL; i++) {
        saved[i * CONSUMERS] = {sums[i][0], sums[i][1], sums[i][2], sums[i][3]};
        sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.f;
    }
#pragma unroll
    for (int begin = 0; begin < PARTIAL; begin += BATCH) {
#pragma unroll 1
        for (int next = 0; next < sharing.count; next += room) {
            const int end = min(next + room, sharing.count);
#pragma unroll 1
            for (int s = next; s < end; s++) {
                if (s == sharing.mine) continue;
                const int block = sharing.first + s * sharing.stride;
                const Float4* slot = slot_of<Consumers, PARTIAL>(partials, deal, block, tile) + begin * CONSUMERS;
                const uint32_t to = shared_address(fetched + (s - next) * (BATCH * CONSUMERS));
#pragma unroll
                for (int i = 0; i < BATCH; i++) copy_async16(to + i * VECTOR_BYTES, slot + i * CONSUMERS, 16);
            }
            copy_commit();
            copy_wait<0>();
#pragma unroll 1
            for (int s = next; s < end; s++) {
                const Float4* from =
                    s == sharing.mine ? saved + begin * CONSUMERS : fetched + (s - next) * (BATCH * CONSUMERS);
#pragma unroll
                for (int i = 0; i < BATCH; i++) add_to(sums[begin + i], from[i * CONSUMERS]);
            }
        }
    }
    Consumers::sync();  // the tile goes there next
}

// PAIRS: each block sends the sums of the rows that the other one finishes, and adds what it gets to its own of the rest,
// which come to lie in front. The pair's first block finishes the first half. (Two sums have one order.) Only consumers
// meet here: the producer has exited, or is about to, as there is no other piece.
__device__ __forceinline__ void sum_over_pair(Owned& own, uint8_t* smem) {
    const int thread = thread_anew(), half = blockIdx.y;
    const uint32_t to = cluster_address(shared_address(smem) + thread * 16, 1 - half);
    cluster_arrive();  // this block's ring is read
    cluster_wait();
#pragma unroll
    for (int j = 0; j < OWN; j++)
#pragma unroll
        for (int mb = 0; mb < END_BLOCKS; mb++) {
            float(&low)[4] = own[j][mb], (&high)[4] = own[j][M_BLOCKS - END_BLOCKS + mb], other[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                other[i] = half == 0 ? high[i] : low[i];
                low[i] = half == 0 ? low[i] : high[i];
            }
            store_cluster(to + (j * END_BLOCKS + mb) * VECTOR_BYTES, {other[0], other[1], other[2], other[3]});
        }
    cluster_arrive();
    cluster_wait();
    const Float4* from = reinterpret_cast<const Float4*>(smem) + thread;
#pragma unroll
    for (int j = 0; j < OWN; j++)
#pragma unroll
        for (int mb = 0; mb < END_BLOCKS; mb++) add_to(own[j][mb], from[(j * END_BLOCKS + mb) * CONSUMERS]);
    Consumers::sync();  // what comes next lies there
}

// ---- registers -> global -------------------------------------------------------------------------------------------
//
// A tile's rows wait in shared memory as vectors of eight columns: a slab has two, or with gate and up one. stmatrix
// transposes 8 x 8 sums of a warp into a column of vectors. But what its rows g have is of slab_of(g): pair i of the vector
// in the place of a chunk's slab u belongs to slab (u + i * J) % 4. So lanes, once they have read a chunk, exchange pairs.
// Vectors lie as in boxes of a tensor map, [END_ROWS][64] swizzled like activations, by which a tile leaves while the next one
// is multiplied.

constexpr int COLUMNS = 64 * J;              // of a wn
constexpr int LOG_VECTORS = J == 1 ? 3 : 4;  // of a row of them
static_assert(COLUMNS / 8 == 1 << LOG_VECTORS, "a power of two");

__device__ __forceinline__ int vector_at(int row, int vector) {  // in bytes
    return (vector / 8 * END_ROWS + row) * 128 + (vector % 8 ^ row % 8) * 16;
}

// The consumers of a wn, who store its columns. One of them sends boxes, and alone can wait until they are read.
constexpr int STORERS = CONSUMERS / WG_N;
__device__ __forceinline__ void sync_storers(const Warp& w) {
    if (WG_N == 1)
        Consumers::sync();
    else
        sync_some<STORERS>(2 + w.wn);
}
__device__ __forceinline__ bool sends(int warp) { return APART && warp % 4 == 0 && elected(); }

// Rounds once.
__device__ __forceinline__ void round_tile(const Owned& own, uint32_t output, const Problem& p, const Tile& tile,
                                           const Warp& w) {
    const int lane = thread_anew() % 32, g = lane / 4;
#pragma unroll
    for (int j = 0; j < OWN; j++) {
        const int n = tile.n0 + w.own_column(g) + 16 * j + g;
        float bias[2] = {0.f, 0.f};
        if (p.bias != nullptr) {
            if (n < p.n) bias[0] = Type::to_float(p.bias[n]);
            if (n + 8 < p.n) bias[1] = Type::to_float(p.bias[n + 8]);
        }
        const uint32_t to = output + vector_at(lane % 8, (w.own_slab() + j) * 2 + lane / 8 % 2);
#pragma unroll
        for (int mb = 0; mb < END_BLOCKS; mb++) {
            const float(&v)[4] = own[j][mb];
            store_transposed(to + mb * 1024, Type::pair(v[0] + bias[0], v[1] + bias[0]),
                             Type::pair(v[2] + bias[1], v[3] + bias[1]));
        }
    }
}

// The same for gate and up: a lane holds column g of both, as its columns n = g and g + 8.
__device__ __forceinline__ void round_gated_tile(const Owned& own, uint32_t output, const Warp& w) {
#pragma unroll
    for (int j = 0; j < OWN; j++) {
        const uint32_t to = output + vector_at(thread_anew() % 8, w.own_slab() + j);
#pragma unroll
        for (int mb = 0; mb < END_BLOCKS; mb++) {
            const float(&v)[4] = own[j][mb];
            store_transposed(to + mb * 1024, Type::pair(silu(v[0]) * v[2], silu(v[1]) * v[3]));
        }
    }
}

// How many slabs from its own one on the vector is that a slab's pair i is in.
__device__ __forceinline__ int turned(int slab, int i) { return ((slab - i * J) & 3) - slab; }

// Completes the vectors of a tile's rows, and puts them back (BOXED) or those of [begin, end) into global memory, as far as
// they exist. A slab has 1 << LOG_SLAB of them.
template <int LOG_SLAB, bool BOXED>
__device__ __forceinline__ void complete(uint8_t* output, uint16_t* to, int64_t ldc, int begin, int end, int vectors) {
    constexpr int LOG = LOG_VECTORS - 1 + LOG_SLAB, STEP = STORERS >> LOG;  // 1 << LOG lanes take a row together
    constexpr int PASSES = (END_ROWS + STEP - 1) / STEP;
    constexpr int AT_ONCE = PASSES % 4 == 0 ? 4 : PASSES % 3 == 0 ? 3 : PASSES % 2 == 0 ? 2 : 1;
    static_assert(STEP % 8 == 0, "passes differ in whole blocks of eight rows");
    const int thread = thread_anew() % STORERS, part = thread & ((1 << LOG) - 1), first = thread >> LOG;
    int lanes[4];
#pragma unroll
    for (int i = 0; i < 4; i++) lanes[i] = thread + (turned(part >> LOG_SLAB & 3, i) << LOG_SLAB);
    uint8_t* at = output + vector_at(first, part);
    to += first * ldc + part * 8;
#pragma unroll
    for (int pass = 0; pass < PASSES; pass += AT_ONCE) {
        Vec4 vector[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const bool there = END_ROWS % STEP == 0 || first + (pass + i) * STEP < END_ROWS;  // else read anything
            vector[i] = *reinterpret_cast<const Vec4*>(at + (there ? (pass + i) * (STEP * 128) : 0));
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int row = first + (pass + i) * STEP;
            uint32_t* pairs = &vector[i].x;
#pragma unroll
            for (int pair = 1; pair < 4; pair++)
                if (pair * J % 4 != 0) pairs[pair] = __shfl_sync(0xffffffff, pairs[pair], lanes[pair]);
            if (BOXED) {
                if (row < END_ROWS) *reinterpret_cast<Vec4*>(at + (pass + i) * (STEP * 128)) = vector[i];
            } else {
                if (row >= begin && row < end && part < vectors) *reinterpret_cast<Vec4*>(to) = vector[i];
                to += STEP * ldc;
            }
        }
    }
}

// Stores the columns from `first_column` on by elements, neighbours side by side. Every thread makes as many passes: see
// barrier_wait.
template <int LOG_SLAB>
__device__ __forceinline__ void store_elements(const uint8_t* output, uint16_t* to, int64_t ldc, int begin, int end,
                                               int columns, int first_column) {
    const int log = first_column > 0 ? 3 : LOG_VECTORS - 1 + LOG_SLAB + 3, thread = thread_anew() % STORERS;
    const int column = first_column + (thread & ((1 << log) - 1));
    const int vector = column / 8 + (turned(column >> (3 + LOG_SLAB) & 3, column / 2 % 4) << LOG_SLAB);
#pragma unroll 1
    for (int first = 0; first < END_ROWS; first += STORERS >> log) {
        const int row = first + (thread >> log);
        if (row >= begin && row < end && column < columns)
            to[row * ldc + column] = *reinterpret_cast<const uint16_t*>(output + vector_at(row, vector) + column % 8 * 2);
    }
}

// Writes what exists of a tile: by boxes where there is another tile to multiply meanwhile, else rows by 16 bytes; and by
// elements what is not aligned.
__device__ __forceinline__ void store_tile(const Owned& own, uint8_t* smem, const TensorMap* boxes, const Problem& p,
                                           const Tile& tile, const Warp& w, int warp, bool last) {
    uint8_t* output = smem + OUTPUT_AT + w.wn * (END_ROWS * COLUMNS * 2);
    const int halved = p.gated ? 1 : 0, n0 = (tile.n0 + w.wn * COLUMNS) >> halved;
    const int m0 = first_row(tile, p) + (PAIRS ? blockIdx.y * END_ROWS : 0);
    const int begin = tile.m0 - m0, end = min(END_ROWS, p.m - m0);  // of the rows here
    const int columns = min(COLUMNS >> halved, p.n - n0);  // none if negative
    uint16_t* to = p.c + m0 * p.ldc + n0;
    const bool aligned = ((reinterpret_cast<uint64_t>(p.c) | (p.ldc * 2)) & 15) == 0;
    if (OUTPUT_AT == 0) Consumers::sync();  // sums lay there
    if (APART) {                            // or the tile before
        if (sends(warp)) boxes_read();
        sync_storers(w);
    }
    if (p.gated)
        round_gated_tile(own, shared_address(output), w);
    else
        round_tile(own, shared_address(output), p, tile, w);
    sync_storers(w);
    // Boxes would write all of a vector that exists in part, and another tile's rows.
    if (APART && aligned && !last && !p.gated && columns % 8 == 0 && begin == 0) {
        complete<1, true>(output, nullptr, 0, 0, 0, 0);
        hand_to_copies();
        sync_storers(w);
        if (sends(warp)) {
#pragma unroll
            for (int i = 0; i < J; i++) store_box(boxes, n0 + i * 64, tile.m0, shared_address(output) + i * (END_ROWS * 128));
            boxes_commit();
        }
        return;
    }
    const int vectors = aligned ? columns / 8 : 0;  // of a row
    if (vectors > 0) {
        if (p.gated)
            complete<0, false>(output, to, p.ldc, begin, end, vectors);
        else
            complete<1, false>(output, to, p.ldc, begin, end, vectors);
    }
    if (vectors * 8 < columns) {
        if (p.gated)
            store_elements<0>(output, to, p.ldc, begin, end, columns, vectors * 8);
        else
            store_elements<1>(output, to, p.ldc, begin, end, columns, vectors * 8);
    }
}

// ---- the kernel ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ void consume(uint8_t* smem, int warp, const TensorMap* boxes, const Problem& p,
                                        const Deal& deal, Float4* partials, uint32_t* counters) {
    const uint32_t ring = shared_address(smem);
    uint32_t& arrived = *reinterpret_cast<uint32_t*>(smem + ARRIVED_AT);
    const Warp w(warp);
    Pieces pieces(deal);
    Place at;
    uint32_t tell_parity = 0;
    Float4* slots = partials + (PAIRS ? blockIdx.y * PARTIAL * CONSUMERS : 0);  // a pair has two, one a block
    wait_for_previous_grid();
#pragma unroll 1
    while (pieces.left(deal)) {
        const Piece piece = pieces.take(deal);
        const Tile tile = place_of(piece.tile, p);
        Totals sums = {};
        Fetched f;
        if (GROUP == 0) column_scales(f.scales, p, tile, w);
        run_units(sums, f, ring, at, w, own_units(piece).last - own_units(piece).first);
        if (SCALES_SUMS && GROUP == 0) add_scaled(sums.all, sums.all, f.scales.scale);
        Owned own;
        sum_over_warpgroups(own, sums.all, smem, w);
        if (PAIRS) sum_over_pair(own, smem);
        const bool shares = piece.last - piece.first < deal.units;
        bool whole = true;
        if (shares) {
            if (APART) {  // the ring and the output are read
                if (sends(warp)) boxes_read();
                Consumers::sync();
            }
            float(&partial)[PARTIAL][4] = *reinterpret_cast<float(*)[PARTIAL][4]>(&own);
            barrier_wait(ring + TELL_AT, tell_parity);
            tell_parity ^= 1;
            const Told& told = *reinterpret_cast<const Told*>(smem + TOLD_AT);
            const Sharing sharing = told.sharing;
            whole = hand_in<Consumers>(partial, arrived, slots, counters + counter_of(piece.tile), deal, sharing, piece.tile,
                                       told.last != 0);
            // The producer is at the next piece already, if there is one.
            const int bytes = APART ? END_BYTES : (pieces.left(deal) ? END_SLOTS : STAGES) * STAGE_BYTES;
            if (whole) add_up(partial, smem, bytes, slots, deal, sharing, piece.tile);
        }
        if (whole) store_tile(own, smem, boxes, p, tile, w, warp, !pieces.left(deal));
        hand_to_copies();
        __syncwarp();
        if (w.lane == 0 && (shares || !APART)) barrier_arrive(ring + IDLE_AT);
    }
    if (sends(warp)) boxes_written();
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    marlin_wgmma(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap w,
                 const __grid_constant__ TensorMap scale_rows, const __grid_constant__ TensorMap zero_rows,
                 const uint16_t* scales, const uint16_t* zeros, const uint16_t* bias,
                 const __grid_constant__ TensorMap boxes, uint16_t* c, int64_t ldc, int m, int n, int padded_n,
                 int padded_k, int gated, int split_tiles, int each, Float4* partials, uint32_t* counters) {
    extern __shared__ __align__(1024) uint8_t smem[];
    const uint32_t ring = shared_address(smem);
    const Problem p = {scales, zeros, bias, c, ldc, m, n, padded_n, gated != 0};
    const int tiles = ((m + M_TILE - 1) / M_TILE) * ((padded_n + TILE_N - 1) / TILE_N);
    const int units = (padded_k + K_STAGE - 1) / K_STAGE;
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // known to be the same for all lanes
    if (warp >= CONSUMERS / 32) {
        give_registers<PRODUCER_REGISTERS>();
        if (warp == CONSUMERS / 32) {
            const Maps maps = {&a, &w, &scale_rows, &zero_rows};
            prefetch(maps);
            const Deal deal(split_tiles, units, each, tiles);
            __syncthreads();
            produce(smem, maps, p, deal, counters);
        } else {
            __syncthreads();
        }
    } else {
        if (threadIdx.x == 0) {
#pragma unroll
            for (int i = 0; i < STAGES; i++) {
                barrier_init(ring + FULL_AT + i * 8, 1);
                barrier_init(ring + EMPTY_AT + i * 8, CONSUMERS / 32);
            }
            barrier_init(ring + IDLE_AT, CONSUMERS / 32);
            barrier_init(ring + TELL_AT, 1);
            barriers_ready();
        }
        __syncthreads();
        take_registers<CONSUMER_REGISTERS>();
        const Deal deal(split_tiles, units, each, tiles);
        consume(smem, warp, &boxes, p, deal, partials, counters);
    }
}
