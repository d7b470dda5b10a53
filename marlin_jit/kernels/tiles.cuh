// How a grid divides the tiles of C, and the sums of blocks that share one: what marlin.cu and wgmma.cu have in common.
//
// A unit is one stage's k of one tile. The first `split_tiles` tiles are split: either their units are dealt out evenly
// over the grid in order, so that a block may begin and end inside a tile; or (each > 0) every tile has the same number
// of blocks, which take `each` units, the last one what is left. The other tiles are whole, one after another.
// Of the blocks that share a tile the one that arrives last adds the float32 partial sums of all, always in ascending
// k: the result does not depend on who was last, nobody waits, and the counter is left at zero.
#pragma once
#include "ptx.cuh"

struct Tile {
    int m0, n0;
};

// Tiles in bands of BAND m-tiles, m fastest: a wave of blocks then touches few rows of A and few columns of W.
constexpr int BAND = 16;
template <int ROWS, int COLUMNS>
__device__ __forceinline__ Tile tile_at(int index, int m, int padded_n) {
    const int m_tiles = (m + ROWS - 1) / ROWS;
    const int n_tiles = (padded_n + COLUMNS - 1) / COLUMNS;
    const int band = index / (BAND * n_tiles);
    const int rest = index - band * BAND * n_tiles;
    const int rows = min(BAND, m_tiles - band * BAND);
    return {(band * BAND + rest % rows) * ROWS, (rest / rows) * COLUMNS};
}

// The units of all split tiles, one tile after another, in runs, one a block.
struct Deal {
    int tiles, units, each, blocks, share, extra;
    int run_begin, run_end;  // this block's
    int all_tiles;           // the whole ones too
    __device__ __forceinline__ Deal(int tiles, int units, int each, int all_tiles)
        : tiles(tiles), units(units), each(each), blocks(gridDim.x), share(tiles * units / blocks),
          extra(tiles * units % blocks), run_begin(begin(blockIdx.x)), run_end(end(blockIdx.x)), all_tiles(all_tiles) {}
    __device__ __forceinline__ int begin(int block) const {
        return each > 0 ? block % tiles * units + block / tiles * each : block * share + min(block, extra);
    }
    __device__ __forceinline__ int end(int block) const {
        if (each == 0) return begin(block + 1);
        return block + tiles < blocks ? begin(block) + each : (block % tiles + 1) * units;
    }
    // Whose run a unit is in, where all are dealt out evenly.
    __device__ __forceinline__ int owner(int unit) const {
        const int large = extra * (share + 1);
        return unit < large ? unit / (share + 1) : extra + (unit - large) / share;
    }
    // How many blocks share a tile, and which is the i-th in ascending k.
    __device__ __forceinline__ int sharers(int tile) const {
        return each > 0 ? blocks / tiles : owner((tile + 1) * units - 1) - owner(tile * units) + 1;
    }
    __device__ __forceinline__ int sharer(int tile, int i) const {
        return each > 0 ? tile + i * tiles : owner(tile * units) + i;
    }
    // Whether the tile's other blocks may well be done when this one ends its run.
    __device__ __forceinline__ bool ends_late() const { return run_end - run_begin > each; }
};

// What a block does: its run of the split tiles' units, tile by tile, then whole tiles at a stride of the grid.
struct Piece {
    int tile, first, last;  // units [first, last)
};
struct Pieces {
    int unit, index;
    __device__ __forceinline__ explicit Pieces(const Deal& deal)
        : unit(deal.run_begin), index(deal.tiles + blockIdx.x) {}
    __device__ __forceinline__ bool dealt(const Deal& deal) const { return unit < deal.run_end; }
    __device__ __forceinline__ bool left(const Deal& deal) const { return dealt(deal) || index < deal.all_tiles; }
    __device__ __forceinline__ Piece next(const Deal& deal) const {
        const int tile = dealt(deal) ? unit / deal.units : index;
        const int first = dealt(deal) ? unit - tile * deal.units : 0;
        return {tile, first, dealt(deal) ? min(deal.units, first + deal.run_end - unit) : deal.units};
    }
    __device__ __forceinline__ Piece take(const Deal& deal) {
        const Piece piece = next(deal);
        if (dealt(deal))
            unit += piece.last - piece.first;
        else
            index += gridDim.x;
        return piece;
    }
};

// A block has two slots of COUNT Float4s a thread: for the tile it begins in, and for the one it ends in.
template <class Threads, int COUNT>
__device__ __forceinline__ Float4* slot_of(Float4* partials, const Deal& deal, int block, int tile) {
    const int which = deal.begin(block) / deal.units == tile ? 0 : 1;
    return partials + static_cast<int64_t>(2 * block + which) * COUNT * Threads::COUNT + threadIdx.x;
}

// Hands in this block's partial sums of a split tile. True for the last block to arrive, whose sums are then the
// total. `Threads` are those that hold sums, the block's first: their COUNT, and sync() among them. With `look` the
// block first sees whether it is the last: then its sums need not be written. `arrived` and `smem` are shared.
template <class Threads, int FLIGHT, int COUNT>
__device__ __forceinline__ bool sum_over_blocks(float (&sums)[COUNT][4], uint8_t* smem, uint32_t& arrived,
                                                Float4* partials, uint32_t* counters, const Deal& deal, int tile,
                                                bool look) {
    constexpr int THREADS = Threads::COUNT;
    const int sharers = deal.sharers(tile), me = blockIdx.x;
    const uint32_t others = sharers - 1;
    bool last = false;
    if (look) {
        if (threadIdx.x == 0) arrived = load_acquire(counters + tile);
        Threads::sync();
        last = arrived == others;
    }
    if (!last) {
        Float4* mine = slot_of<Threads, COUNT>(partials, deal, me, tile);
#pragma unroll
        for (int i = 0; i < COUNT; i++) mine[i * THREADS] = {sums[i][0], sums[i][1], sums[i][2], sums[i][3]};
        Threads::sync();
        if (threadIdx.x == 0) arrived = count_in_alone(counters + tile);
        Threads::sync();
        last = arrived == others;
    }
    Threads::sync();  // `arrived` is written again by the next tile
    if (!last) return false;
    if (threadIdx.x == 0) counters[tile] = 0;
    // This block's own sums wait in shared memory for their turn, so that registers hold the total and a number of
    // vectors in flight: of several slots where a slot is small, of a part of one where it is large.
    Float4* saved = reinterpret_cast<Float4*>(smem) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        saved[i * THREADS] = {sums[i][0], sums[i][1], sums[i][2], sums[i][3]};
        sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.f;
    }
    constexpr int BATCH = COUNT < FLIGHT ? COUNT : FLIGHT, SLOTS = FLIGHT / BATCH;
    for (int next = 0; next < sharers; next += SLOTS) {
#pragma unroll
        for (int begin = 0; begin < COUNT; begin += BATCH) {
            Float4 v[SLOTS][BATCH];
#pragma unroll
            for (int s = 0; s < SLOTS; s++) {
                if (next + s >= sharers) continue;
                const int block = deal.sharer(tile, next + s);
                if (block == me) {
#pragma unroll
                    for (int i = 0; i < BATCH; i++) v[s][i] = saved[(begin + i) * THREADS];
                } else {
                    const Float4* slot = slot_of<Threads, COUNT>(partials, deal, block, tile) + begin * THREADS;
#pragma unroll
                    for (int i = 0; i < BATCH; i++) v[s][i] = load_l2(slot + i * THREADS);
                }
            }
#pragma unroll
            for (int s = 0; s < SLOTS; s++) {
                if (next + s >= sharers) continue;
#pragma unroll
                for (int i = 0; i < BATCH; i++) {
                    sums[begin + i][0] += v[s][i].x, sums[begin + i][1] += v[s][i].y;
                    sums[begin + i][2] += v[s][i].z, sums[begin + i][3] += v[s][i].w;
                }
            }
        }
    }
    Threads::sync();  // `saved` lies where the tile goes next
    return true;
}
