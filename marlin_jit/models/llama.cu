// What a Llama layer does between its products, as five small kernels: each reads its input once and rounds once.
// marlin_jit/models/ops.py has the same maths in NumPy, operation by operation.
//
// Built by CuPy's RawModule with
//   BF16      1: activations are bfloat16, 0: float16
//   HEAD_DIM  elements of a head: a power of two from 8 to 256
//
// `position` is where the first of the new tokens goes. It is read from device memory, so a captured CUDA graph
// stays right while it moves. Needs no header; bfloat16 needs compute capability 8.0.

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
