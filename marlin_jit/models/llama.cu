// What a Llama layer does between its products, as six small kernels: each reads its input once and rounds once.
// marlin_jit/models/ops.py has the same maths in NumPy, operation by operation.
//
// Built by CuPy's RawModule with
//   BF16      1: activations are bfloat16, 0: float16
//   HEAD_DIM  elements of a head: a power of two from 8 to 256
//
// `position` is where the first of the new tokens goes. It is read from device memory, so a captured CUDA graph
// stays right while it moves. Needs no header, and compute capability 8.0.

typedef unsigned short half_t;  // the bits of a float16 or bfloat16

__device__ __forceinline__ float value_of(half_t bits) {
#if BF16
    return __uint_as_float((unsigned)bits << 16);
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#endif
}

__device__ __forceinline__ half_t rounded(float value) {
    half_t bits;
#if BF16
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#endif
    return bits;
}

// h += delta (which may be null), then out = h/rms(h) * weight. One block a row.
extern "C" __global__ void add_rms_norm(half_t* h, const half_t* delta, const float* weight, half_t* out,
                                        int columns, float eps) {
    __shared__ float sums[32];
    const long long start = (long long)blockIdx.x * columns;
    float sum = 0;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        half_t bits = h[start + i];
        if (delta) {
            bits = rounded(value_of(bits) + value_of(delta[start + i]));
            h[start + i] = bits;
        }
        const float value = value_of(bits);
        sum += value * value;
    }
    for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int warp = 0; warp < blockDim.x / 32; ++warp) sum += sums[warp];
    const float scale = rsqrtf(sum / columns + eps);
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
        out[start + i] = rounded(value_of(h[start + i]) * scale * weight[i]);
}

// Turn q (in place) and k by their positions; put k and v into the cache. One block a token and head: first the
// heads of q, then those of k, then those of v; one thread a pair of elements.
extern "C" __global__ void rotate_and_store(half_t* q, const half_t* k, const half_t* v, long long q_stride,
                                            long long k_stride, long long v_stride, const float* cosines,
                                            const float* sines, const int* position, half_t* keys, half_t* values,
                                            int tokens, int heads, int kv_heads, int length, int interleaved) {
    const int row = blockIdx.x, i = threadIdx.x;
    const int place = *position + row % tokens;
    if (place >= length) return;  // the host has checked; never write past the cache
    int head = blockIdx.y;
    const int first = interleaved ? 2 * i : i;
    const int second = interleaved ? 2 * i + 1 : i + HEAD_DIM / 2;
    const half_t* from;
    half_t* to;
    bool turn = true;
    if (head < heads) {
        to = q + row * q_stride + head * HEAD_DIM;
        from = to;
    } else {
        head -= heads;
        const bool is_key = head < kv_heads;
        if (!is_key) head -= kv_heads;
        const long long slot = ((long long)(row / tokens) * kv_heads + head) * length + place;
        to = (is_key ? keys : values) + slot * HEAD_DIM;
        from = (is_key ? k + row * k_stride : v + row * v_stride) + head * HEAD_DIM;
        turn = is_key;
    }
    const half_t a = from[first], b = from[second];
    if (!turn) {
        to[first] = a;
        to[second] = b;
        return;
    }
    const float cosine = cosines[place * (HEAD_DIM / 2) + i], sine = sines[place * (HEAD_DIM / 2) + i];
    to[first] = rounded(value_of(a) * cosine - value_of(b) * sine);
    to[second] = rounded(value_of(b) * cosine + value_of(a) * sine);
}

// softmax(q k^T / sqrt(HEAD_DIM)) v over the positions up to each token's own. One block a token, head and text.
//
// A group of HEAD_DIM/8 threads takes one position at a time, eight elements a thread, with a running maximum; at
// the end the groups' sums are put on one maximum and added. Nothing depends on the length of the cache but time.
#define LANES (HEAD_DIM / 8)
#define THREADS 256
#define GROUPS (THREADS / LANES)

extern "C" __global__ void __launch_bounds__(THREADS)
    attention(const half_t* q, long long q_stride, const half_t* keys, const half_t* values, const int* position,
              half_t* out, int tokens, int heads, int kv_heads, int length) {
    __shared__ float maxima[GROUPS], totals[GROUPS], sums[GROUPS][HEAD_DIM];
    const int token = blockIdx.x, head = blockIdx.y, text = blockIdx.z;
    const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const unsigned together = (LANES == 32 ? ~0u : (1u << LANES % 32) - 1) << (threadIdx.x % 32 / LANES * LANES);
    const long long row = (long long)text * tokens + token;
    const long long start = ((long long)text * kv_heads + head / (heads / kv_heads)) * length * HEAD_DIM + lane * 8;
    const int end = min(*position + token + 1, length);

    float query[8], sum[8] = {0};
    for (int i = 0; i < 8; ++i)
        query[i] = value_of(q[row * q_stride + head * HEAD_DIM + lane * 8 + i]) * rsqrtf((float)HEAD_DIM);
    float maximum = __int_as_float(0xff800000), total = 0;  // minus infinity
    for (int place = group; place < end; place += GROUPS) {
        const uint4 key = *(const uint4*)(keys + start + (long long)place * HEAD_DIM);
        const uint4 value = *(const uint4*)(values + start + (long long)place * HEAD_DIM);
        const unsigned key_bits[4] = {key.x, key.y, key.z, key.w};
        const unsigned value_bits[4] = {value.x, value.y, value.z, value.w};
        float dot = 0;
        for (int i = 0; i < 8; ++i) dot += query[i] * value_of((half_t)(key_bits[i / 2] >> 16 * (i % 2)));
        for (int offset = LANES / 2; offset; offset /= 2) dot += __shfl_xor_sync(together, dot, offset);
        const float larger = fmaxf(maximum, dot);
        const float shrink = expf(maximum - larger), weight = expf(dot - larger);
        total = total * shrink + weight;
        for (int i = 0; i < 8; ++i)
            sum[i] = sum[i] * shrink + weight * value_of((half_t)(value_bits[i / 2] >> 16 * (i % 2)));
        maximum = larger;
    }
    if (lane == 0) {
        maxima[group] = maximum;
        totals[group] = total;
    }
    for (int i = 0; i < 8; ++i) sums[group][lane * 8 + i] = sum[i];
    __syncthreads();
    if (threadIdx.x >= HEAD_DIM) return;
    for (int g = 0; g < GROUPS; ++g) maximum = fmaxf(maximum, maxima[g]);
    float all = 0, result = 0;
    for (int g = 0; g < GROUPS; ++g) {
        const float weight = expf(maxima[g] - maximum);
        all += totals[g] * weight;
        result += sums[g][threadIdx.x] * weight;
    }
    out[(row * heads + head) * HEAD_DIM + threadIdx.x] = rounded(result / all);
}

// The same for many new tokens, on tensor cores (FlashAttention): what a block loads of the cache serves 64 tokens.
//
// A block has 64 tokens of one head, a warp 16 of them. The cache comes in tiles of TILE places, the next one on its
// way while one is used. Of each a warp makes scores s = q k^T, 16 x TILE, then weights p = exp(s - running maximum),
// then adds p v. Everything stays in registers, laid out as `mma` m16n8k16 has it. With g = lane / 4, t = lane % 4:
//   query[k]   A, tokens x elements: tokens g and g + 8, elements 16k + 2t, + 1, + 8, + 9
//   s[n]       C, tokens x places: [0], [1] are token g, places 8n + 2t, + 1; [2], [3] are token g + 8
//   p          A, tokens x places: registers of s[2k] and s[2k + 1], rounded to 16 bits two by two
//   sum[n]     C, tokens x elements, as s[n]; `total` likewise: p times ones, so every column is the sum of weights
//
// Weights are rounded to 16 bits, as v is, and the total is that of rounded weights. So they move the result by at most
// u = 2^-11 (bfloat16: 2^-8) times the mean distance of the values from it, by weights: no more than half its last
// place where values are of its size. A float16 weight below 2^-14 of the largest is off by 2^-25 of that at most.
//
// Places behind the new tokens are neither read nor multiplied: shared memory has zeros in their stead. Those of later
// new tokens have the weight 0, so only a value that is not finite is seen by tokens before it (as in NumPy).
#if HEAD_DIM >= 16
constexpr int TILE = HEAD_DIM > 64 ? 4096 / HEAD_DIM : 64;
constexpr int PITCH = HEAD_DIM + 8;  // of a row in shared memory: eight rows' same 16 bytes lie in all 32 banks

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return (unsigned)__cvta_generic_to_shared(pointer);
}

// Start copying a tile of keys or values, of which the cache has only `rows`. Each thread has 16 bytes of some rows,
// which in the cache lie one after another.
__device__ __forceinline__ void load_tile(half_t (&to)[TILE][PITCH], const half_t* from, int rows) {
    const int first = threadIdx.x / (HEAD_DIM / 8), column = threadIdx.x % (HEAD_DIM / 8) * 8;
    const half_t* mine = from + threadIdx.x * 8;
#pragma unroll
    for (int row = 0; row < TILE; row += 1024 / HEAD_DIM) {
        const int bytes = first + row < rows ? 16 : 0;  // that are read; the rest of the 16 is written as zeros
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(&to[first + row][column])),
                     "l"(mine + row * HEAD_DIM), "r"(bytes)
                     : "memory");
    }
}

// Two B fragments from shared memory: four 8 x 8 matrices, of which lane 8i + r points at row r of matrix i.
__device__ __forceinline__ void load_matrices(unsigned (&b)[4], unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(from)
                 : "memory");
}
__device__ __forceinline__ void load_transposed(unsigned (&b)[4], unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(from)
                 : "memory");
}

#if BF16
#define MMA_TYPES "f32.bf16.bf16.f32"
#define PAIR_TYPE "bf16x2"
#define ONES 0x3f803f80
#else
#define MMA_TYPES "f32.f16.f16.f32"
#define PAIR_TYPE "f16x2"
#define ONES 0x3c003c00
#endif
// c += a (16 x 16) * b (16 x 8)
__device__ __forceinline__ void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col." MMA_TYPES " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ unsigned rounded_pair(float low, float high) {
    unsigned pair;
    asm("cvt.rn." PAIR_TYPE ".f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ float power_of_2(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

// A thread has so few registers that an SM has room for four blocks (three, two for the largest heads).
extern "C" __global__ void __launch_bounds__(128, HEAD_DIM > 128 ? 2 : HEAD_DIM > 64 ? 3 : 4)
    attention_of_many(const half_t* q, long long q_stride, const half_t* keys, const half_t* values,
                      const int* position, half_t* out, int tokens, int heads, int kv_heads, int length) {
    __shared__ __align__(16) half_t tiles[2][2][TILE][PITCH];  // [one in use, one on its way][keys, values]
    const int head = blockIdx.x, text = blockIdx.y;
    const int first = (gridDim.z - 1 - blockIdx.z) * 64;  // token of the block; those that see most start first
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warp_first = first + threadIdx.x / 32 * 16, token = warp_first + g;
    const int start = *position;
    const int end = min(start + min(first + 64, tokens), length);  // of the places that the block sees
    const long long cache = ((long long)text * kv_heads + head / (heads / kv_heads)) * length * HEAD_DIM;
    keys += cache;
    values += cache;

    // A token beyond the last, of a ragged block, is computed as the last one and not stored.
    unsigned query[HEAD_DIM / 16][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const long long row = (long long)text * tokens + min(token + 8 * half, tokens - 1);
        const half_t* from = q + row * q_stride + head * HEAD_DIM + 2 * t;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; ++i)
            query[i / 2][i % 2 * 2 + half] = from[8 * i] | (unsigned)from[8 * i + 1] << 16;
    }

    // Where the lane points at for the first keys (matrices: places 0..7 elements 0..7, elements 8..15, places 8..15
    // likewise) and values (places 0..7, 8..15, elements 8..15 likewise).
    const int key_at = (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 8;
    const int value_at = lane % 16 * PITCH + lane / 16 * 8;

    const float scale = 1.44269504f * rsqrtf((float)HEAD_DIM);  // with log2(e): powers are of 2
    const float infinity = __int_as_float(0x7f800000);
    float sum[HEAD_DIM / 8][4] = {}, total[4] = {}, maximum[2] = {-infinity, -infinity};
    load_tile(tiles[0][0], keys, end);
    load_tile(tiles[0][1], values, end);
    for (int place = 0; place < end; place += TILE) {
        const int stage = place / TILE % 2;
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();  // the tile is there for all, and nobody uses the one before
        const int next = place + TILE;
        keys += TILE * HEAD_DIM;
        values += TILE * HEAD_DIM;
        if (next < end) {
            load_tile(tiles[1 - stage][0], keys, end - next);
            load_tile(tiles[1 - stage][1], values, end - next);
        }
        if (place > start + warp_first + 15) continue;  // the whole warp sees nothing of it

        float s[TILE / 8][4] = {};
        const unsigned key = shared_address(&tiles[stage][0][0][key_at]);
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; ++k)
#pragma unroll
            for (int n = 0; n < TILE / 16; ++n) {
                unsigned b[4];
                load_matrices(b, key + 2 * (16 * n * PITCH + 16 * k));
                mma(s[2 * n], query[k], b[0], b[1]);
                mma(s[2 * n + 1], query[k], b[2], b[3]);
            }
        if (next - 1 > start + warp_first)  // some token does not see all of it
#pragma unroll
            for (int n = 0; n < TILE / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (place + 8 * n + 2 * t + i % 2 > start + token + i / 2 * 8) s[n][i] = -infinity;

#pragma unroll
        for (int half = 0; half < 2; ++half) {  // of the tokens: g, then g + 8, each of which four lanes have
            float largest = fmaxf(s[0][2 * half], s[0][2 * half + 1]);
#pragma unroll
            for (int n = 1; n < TILE / 8; ++n)
                largest = fmaxf(largest, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
            largest = fmaxf(maximum[half], largest * scale);  // finite from the first tile on: all see place 0
            const float shrink = power_of_2(maximum[half] - largest);
            maximum[half] = largest;
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) {
                total[i] *= shrink;
#pragma unroll
                for (int n = 0; n < HEAD_DIM / 8; ++n) sum[n][i] *= shrink;
#pragma unroll
                for (int n = 0; n < TILE / 8; ++n) s[n][i] = power_of_2(s[n][i] * scale - largest);
            }
        }

        const unsigned value = shared_address(&tiles[stage][1][0][value_at]);
#pragma unroll
        for (int k = 0; k < TILE / 16; ++k) {
            const unsigned p[4] = {
                rounded_pair(s[2 * k][0], s[2 * k][1]), rounded_pair(s[2 * k][2], s[2 * k][3]),
                rounded_pair(s[2 * k + 1][0], s[2 * k + 1][1]), rounded_pair(s[2 * k + 1][2], s[2 * k + 1][3])};
            mma(total, p, ONES, ONES);
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 16; ++n) {
                unsigned b[4];
                load_transposed(b, value + 2 * (16 * k * PITCH + 16 * n));
                mma(sum[2 * n], p, b[0], b[1]);
                mma(sum[2 * n + 1], p, b[2], b[3]);
            }
        }
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (token + 8 * half >= tokens) break;
        const long long row = (long long)text * tokens + token + 8 * half;
        half_t* to = out + (row * heads + head) * HEAD_DIM + 2 * t;
        const float share = 1 / total[2 * half];
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; ++n)
            *(unsigned*)(to + 8 * n) = rounded_pair(sum[n][2 * half] * share, sum[n][2 * half + 1] * share);
    }
}
#endif

// out = silu(gate) * up. One thread an element.
extern "C" __global__ void swiglu(const half_t* gate, const half_t* up, long long gate_stride, long long up_stride,
                                  half_t* out, int columns, long long size) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) return;
    const long long row = i / columns, column = i % columns;
    const float g = value_of(gate[row * gate_stride + column]);
    out[i] = rounded(g / (1 + expf(-g)) * value_of(up[row * up_stride + column]));
}

// tokens[row] = the place of the largest of a row of logits, the first of equal ones. One block a row.
extern "C" __global__ void __launch_bounds__(1024) argmax(const half_t* logits, int* tokens, int columns) {
    __shared__ float maxima[32];
    __shared__ int places[32];
    const half_t* row = logits + (long long)blockIdx.x * columns;
    float best = __int_as_float(0xff800000);
    int place = columns;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        const float value = value_of(row[i]);
        if (value > best || place == columns) {
            best = value;
            place = i;
        }
    }
    for (int stage = 0; stage < 2; ++stage) {  // within warps, then the first warp over what those have found
        for (int offset = 16; offset; offset /= 2) {
            const float other = __shfl_xor_sync(0xffffffffu, best, offset);
            const int other_place = __shfl_xor_sync(0xffffffffu, place, offset);
            if (other > best || (other == best && other_place < place)) {
                best = other;
                place = other_place;
            }
        }
        if (stage) break;
        if (threadIdx.x % 32 == 0) {
            maxima[threadIdx.x / 32] = best;
            places[threadIdx.x / 32] = place;
        }
        __syncthreads();
        if (threadIdx.x >= 32) return;
        best = maxima[threadIdx.x];
        place = places[threadIdx.x];
    }
    if (threadIdx.x == 0) tokens[blockIdx.x] = place;
}
