// group_sums: sums[m, g] = sum of A[m, k] over the k of group g, in float32. First half of the correction pair.
//
// A cell (m, g) is summed by LANES neighbouring lanes of a warp, eight elements a load: a group of 128 by sixteen lanes,
// a whole row (one group a column) by a warp that strides over it. The order is fixed, so the result is the same in
// every run. (A block a cell, as one would write it first, spends its time on starting blocks.)
//
// Cells are left where correction.cu reads them: as A fragments of m16n8k8, 16 rows x 8 groups at a time. Groups are
// rounded up to eight; those of the pad are zero. Rows of A start on 16-byte boundaries, and K counts columns rounded up
// to 8; those past the true K are zero.
//
// On the way each thread asks L2 for 128 bytes of the deltas, which nothing before correction.cu reads. (More a thread
// would cost few rows, whose sums are ready at once, more than they gain.)
//
// Build constants: BF16, GROUP (32, 64, 128; 0 = one group a column).
#include "layout.cuh"
#include "numeric.cuh"

constexpr int LANES = GROUP == 0 ? 32 : GROUP / 8;

extern "C" __global__ void __launch_bounds__(256)
    group_sums(const uint16_t* a, int64_t lda, float* sums, int m, int k, int padded_groups, const uint16_t* delta,
               int64_t deltas) {
    wait_for_previous_grid();
    const int lane = threadIdx.x % LANES;
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x, cell = thread / LANES;
    if (thread * 64 < deltas) prefetch_l2(delta + thread * 64);
    const bool inside = cell < static_cast<int64_t>(m) * padded_groups;
    const int row = inside ? cell / padded_groups : 0, group = inside ? cell % padded_groups : 0;
    const int first = GROUP > 0 ? group * GROUP : group == 0 ? 0 : k, last = GROUP > 0 ? min(k, first + GROUP) : k;
    float sum = 0.f;
    for (int i = first + lane * 8; inside && i < last; i += LANES * 8) {
        const Vec4 v = *reinterpret_cast<const Vec4*>(a + row * lda + i);
        const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int p = 0; p < 4; p++) sum += Type::to_float(pairs[p] & 0xffff) + Type::to_float(pairs[p] >> 16);
    }
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffff, sum, offset);
    if (inside && lane == 0) sums[sum_position(row, group, padded_groups)] = sum;
}
