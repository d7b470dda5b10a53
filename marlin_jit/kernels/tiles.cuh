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

// Numbers that are not negative. (A signed division takes half as many instructions again.)
__device__ __forceinline__ int quotient(int a, int b) { return static_cast<uint32_t>(a) / static_cast<uint32_t>(b); }

// Tiles in bands of BAND m-tiles, m fastest: a wave of blocks then touches few rows of A and few columns of W.
constexpr int BAND = 16;
template <int ROWS, int COLUMNS>
__device__ __forceinline__ Tile tile_at(int index, int m, int padded_n) {
    const int m_tiles = (m + ROWS - 1) / ROWS;
    const int n_tiles = (padded_n + COLUMNS - 1) / COLUMNS;
    const int band = quotient(index, BAND * n_tiles);
    const int rest = index - band * BAND * n_tiles;
    const int rows = min(BAND, m_tiles - band * BAND);
    const int column = quotient(rest, rows);
    return {(band * BAND + rest - column * rows) * ROWS, column * COLUMNS};
}

// Who shares a tile: `count` blocks, of which the i-th in ascending k is block first + i * stride. This one is the
// `mine`-th.
struct Sharing {
    int count, first, stride, mine;
};

// The units of all split tiles, one tile after another, in runs, one a block.
struct Deal {
    int tiles, units, each, blocks, all_tiles;  // all_tiles: the whole ones too
    int share = 0, extra = 0;                   // where all are dealt out evenly
    int tile = 0, first = 0, run = 0;           // this block's run: the tile and the unit in it that it begins with, length
    __device__ __forceinline__ Deal(int tiles, int units, int each, int all_tiles)
        : tiles(tiles), units(units), each(each), blocks(gridDim.x), all_tiles(all_tiles) {
        const int block = blockIdx.x;
        if (each > 0) {
            const int part = quotient(block, tiles);
            tile = block - part * tiles, first = part * each;
            run = block + tiles < blocks ? each : units - first;
        } else if (tiles > 0) {
            share = quotient(tiles * units, blocks), extra = tiles * units - share * blocks;
            const int unit = begin(block);
            tile = quotient(unit, units), first = unit - tile * units;
            run = share + (block < extra ? 1 : 0);
        }
    }
    // The first unit of a block's run, and whose run a unit is in, where all are dealt out evenly.
    __device__ __forceinline__ int begin(int block) const { return block * share + min(block, extra); }
    __device__ __forceinline__ int owner(int unit) const {
        const int large = extra * (share + 1);
        return unit < large ? quotient(unit, share + 1) : extra + quotient(unit - large, share);
    }
    __device__ __forceinline__ Sharing sharing(int tile) const {
        const int me = blockIdx.x;
        if (each > 0) return {quotient(blocks, tiles), tile, tiles, quotient(me, tiles)};
        const int first = owner(tile * units), last = owner((tile + 1) * units - 1);
        return {last - first + 1, first, 1, me - first};
    }
};

// What a block does: its run of the split tiles' units, tile by tile, then whole tiles at a stride of the grid.
struct Piece {
    int tile, first, last;  // units [first, last)
    // Where it is the last of a run: whether the tile's other blocks may well be done when this one is.
    __device__ __forceinline__ bool ends_late(const Deal& deal) const { return last - first > deal.each; }
};
struct Pieces {
    int tile, first, run, index;  // what is left
    __device__ __forceinline__ explicit Pieces(const Deal& deal)
        : tile(deal.tile), first(deal.first), run(deal.run), index(deal.tiles + blockIdx.x) {}
    __device__ __forceinline__ bool dealt() const { return run > 0; }
    __device__ __forceinline__ bool left(const Deal& deal) const { return dealt() || index < deal.all_tiles; }
    __device__ __forceinline__ Piece next(const Deal& deal) const {
        if (dealt()) return {tile, first, min(deal.units, first + run)};
        return {index, 0, deal.units};
    }
    __device__ __forceinline__ Piece take(const Deal& deal) {
        const Piece piece = next(deal);
        if (dealt())
            run -= piece.last - first, tile++, first = 0;
        else
            index += gridDim.x;
        return piece;
    }
};

// A block has two slots of COUNT Float4s a thread: for the tile it begins in, and for the one it ends in.
template <class Threads, int COUNT>
__device__ __forceinline__ Float4* slot_of(Float4* partials, const Deal& deal, int block, int tile) {
    const int which = deal.each == 0 && deal.begin(block) < tile * deal.units ? 1 : 0;
    return partials + static_cast<int64_t>(2 * block + which) * COUNT * Threads::COUNT + thread_anew();
}

__device__ __forceinline__ void add_to(float (&sum)[4], const Float4& v) {
    sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
}

// Hands in this block's partial sums of a split tile. True for the last block to arrive, which adds up all. `Threads`
// are those that hold sums, the block's first: their COUNT, and sync() among them, which they did since `arrived`
// (shared) was last read. A block that has found out already (`last`) need not write its sums.
template <class Threads, int COUNT>
__device__ __forceinline__ bool hand_in(const float (&sums)[COUNT][4], uint32_t& arrived, Float4* partials,
                                        uint32_t* counter, const Deal& deal, const Sharing& sharing, int tile, bool last) {
    if (!last) {
        Float4* mine = slot_of<Threads, COUNT>(partials, deal, blockIdx.x, tile);
#pragma unroll
        for (int i = 0; i < COUNT; i++) mine[i * Threads::COUNT] = {sums[i][0], sums[i][1], sums[i][2], sums[i][3]};
        Threads::sync();
        if (threadIdx.x == 0) arrived = count_in(counter);
        Threads::sync();
        if (arrived != sharing.count - 1) return false;
    }
    if (threadIdx.x == 0) *counter = 0;
    return true;
}

// The sums of all blocks that share a tile, in the last of them: through registers. `saved` is where this thread may keep
// COUNT vectors of shared memory, Threads::COUNT apart.
template <class Threads, int FLIGHT, int COUNT>
__device__ __forceinline__ void add_up(float (&sums)[COUNT][4], Float4* saved, Float4* partials, const Deal& deal,
                                       const Sharing& sharing, int tile) {
    constexpr int THREADS = Threads::COUNT;
    // This block's own sums wait in shared memory for their turn, so that registers hold the total and a number of
    // vectors in flight: of several slots where a slot is small, of a part of one where it is large.
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        saved[i * THREADS] = {sums[i][0], sums[i][1], sums[i][2], sums[i][3]};
        sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.f;
    }
    constexpr int BATCH = COUNT < FLIGHT ? COUNT : FLIGHT, FITTING = FLIGHT / BATCH, SLOTS = FITTING < 4 ? FITTING : 4;
    static_assert(COUNT % BATCH == 0, "whole batches only");
#pragma unroll 1
    for (int next = 0; next < sharing.count; next += SLOTS) {
#pragma unroll
        for (int begin = 0; begin < COUNT; begin += BATCH) {
            Float4 v[SLOTS][BATCH];
#pragma unroll
            for (int s = 0; s < SLOTS; s++) {
                if (next + s >= sharing.count) continue;
                if (next + s == sharing.mine) {
#pragma unroll
                    for (int i = 0; i < BATCH; i++) v[s][i] = saved[(begin + i) * THREADS];
                } else {
                    const int block = sharing.first + (next + s) * sharing.stride;
                    const Float4* slot = slot_of<Threads, COUNT>(partials, deal, block, tile) + begin * THREADS;
#pragma unroll
                    for (int i = 0; i < BATCH; i++) v[s][i] = load_l2(slot + i * THREADS);
                }
            }
#pragma unroll
            for (int s = 0; s < SLOTS; s++) {
                if (next + s >= sharing.count) continue;
#pragma unroll
                for (int i = 0; i < BATCH; i++) add_to(sums[begin + i], v[s][i]);
            }
        }
    }
}
