// dense_weights: columns of a packed weight as a dense [columns, padded K] array, the layout that cuBLAS likes best, each
// element rounded once.
//
// A warp takes a chunk of 64 columns in a k16 step: what a lane's vector of B unpacks to are pairs of neighbouring k, which
// lanes 4g .. 4g + 3 store side by side.
//
// Build constants: BF16, GROUP (32, 64, 128; 0 = one group a column), ZEROS (0 = symmetric, 1 = deltas, 2 = zero points).
#include "layout.cuh"
#include "weigh.cuh"

constexpr int WARPS = 8;  // along K

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    dense_weights(const Vec4* b, const uint16_t* scales, const uint16_t* zeros, uint16_t* out, int first_chunk,
                  int padded_n, int padded_k) {
    wait_for_previous_grid();
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int step = blockIdx.y * WARPS + threadIdx.x / 32, chunk = first_chunk + blockIdx.x;
    if (step >= padded_k / 16) return;
    const Vec4 v = b[static_cast<int64_t>(step) * (padded_n / 2) + chunk * 32 + lane];
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    const int64_t at = static_cast<int64_t>(GROUP == 0 ? 0 : step * 16 / (GROUP + (GROUP == 0))) * padded_n + chunk * 64;
    Scales<4> s;
    uint32_t pairs[4] = {};
    slab_pairs(s.scale, scales + at, g, GROUP == 0);
    if (ZEROS) slab_pairs(pairs, zeros + at, g, GROUP == 0);
    s.set_zeros(pairs);
    uint32_t* to = reinterpret_cast<uint32_t*>(out + static_cast<int64_t>(blockIdx.x * 64 + g) * padded_k + step * 16) + t;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t a[4];
        weigh_word(a, words[j], s, j);
        uint32_t* column = to + static_cast<int64_t>(16 * j) * (padded_k / 2);
        column[0] = a[0], column[4] = a[2];
        column += 4 * padded_k;
        column[0] = a[1], column[4] = a[3];
    }
}
