// gather_columns: out[m, i] = x[m, order[i]]: activations in the row order of a weight packed with activation order.
// Columns of out from K to its stride become zero.
//
// A block takes COLUMNS columns. Scattered elements come one a cycle from L1, for each lies in a sector of its own, and some
// eight from shared memory: so it brings the whole row there first (`staged`: the row fits, rows of x are aligned to 16
// bytes, and K is a multiple of 8).
#include "ptx.cuh"

constexpr int THREADS = 512, EACH = 8, COLUMNS = THREADS * EACH;

extern "C" __global__ void __launch_bounds__(THREADS)
    gather_columns(const uint16_t* x, int64_t ldx, const int* order, uint16_t* out, int64_t ldo, int m, int k, int staged) {
    extern __shared__ __align__(16) uint16_t copy[];
    const int first = blockIdx.x * COLUMNS + threadIdx.x;
    int from[EACH];  // the weight's: it was there before
#pragma unroll
    for (int e = 0; e < EACH; e++) from[e] = first + e * THREADS < k ? order[first + e * THREADS] : -1;
    wait_for_previous_grid();
    for (int row = blockIdx.y; row < m; row += gridDim.y) {
        const uint16_t* source = x + row * ldx;
        if (staged) {
            __syncthreads();  // the row before has been read
            for (int i = threadIdx.x * 8; i < k; i += THREADS * 8) copy_async16(shared_address(copy + i), source + i, 16);
            copy_commit();
            copy_wait<0>();
            __syncthreads();
        }
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            uint16_t value = 0;
            if (from[e] >= 0) value = staged ? copy[from[e]] : source[from[e]];
            if (first + e * THREADS < ldo) out[row * ldo + first + e * THREADS] = value;
        }
    }
}
