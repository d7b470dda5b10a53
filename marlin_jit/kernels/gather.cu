// gather_columns: out[m, i] = x[m, order[i]]: activations in the row order of a weight packed with activation order.
// Columns of out from K to its stride become zero.
#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(256)
    gather_columns(const uint16_t* x, int64_t ldx, const int* order, uint16_t* out, int64_t ldo, int m, int k) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    const int from = i < k ? order[i] : -1;  // the weight's: it was there before
    wait_for_previous_grid();
    if (i >= ldo) return;
    for (int row = blockIdx.y; row < m; row += gridDim.y) out[row * ldo + i] = from >= 0 ? x[row * ldx + from] : 0;
}
