// group_sums: sums[m, g] = sum of A[m, k] over the k of group g, in float32. First half of the correction pair.
//
// One block a (m, g) cell; its 128 threads stride over the group, then a tree adds them: the order is fixed, so the
// result is the same in every run.
#include "numeric.cuh"

extern "C" __global__ void __launch_bounds__(128)
    group_sums(const uint16_t* a, int64_t lda, float* sums, int k, int groups, int group_size) {
    const int row = blockIdx.x / groups, group = blockIdx.x % groups;
    const int first = group * group_size, last = min(k, first + group_size);
    float sum = 0.f;
    for (int i = first + threadIdx.x; i < last; i += 128) sum += Type::to_float(a[row * lda + i]);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffff, sum, offset);
    __shared__ float of_warp[4];
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) sums[blockIdx.x] = (of_warp[0] + of_warp[1]) + (of_warp[2] + of_warp[3]);
}
