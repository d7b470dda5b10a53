// dequantize: the weight as a dense [K, N] array in the activation type, each element rounded once.
//
// Fills the FP16 body cache. Threads take neighbouring columns of a row. `source_row`, where given, says which row of the
// output a packed row is (activation order).
#include "weight.cuh"

extern "C" __global__ void __launch_bounds__(256)
    dequantize(const void* codes, const uint16_t* scales, const float* delta, const int* group_of,
               const int* source_row, uint16_t* out, int n, int k, int columns, int groups, int group_size) {
    wait_for_previous_grid();
    const Weight w = {codes, scales, delta, group_of, columns, groups, group_size};
    const int column = blockIdx.x * 256 + threadIdx.x;
    if (column >= n) return;
    for (int row = blockIdx.y; row < k; row += gridDim.y) {
        const int64_t to = source_row != nullptr ? source_row[row] : row;
        out[to * n + column] = Type::from_float(w.at(row, column));
    }
}
