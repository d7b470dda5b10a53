// swiglu: out[m, 8T + r] = silu(y[m, 16T + r]) * y[m, 16T + 8 + r]: what `gated` kernels do with their sums, for paths
// that leave 8 columns of gate and 8 of up in turn, rounded.
//
// Build constant: BF16.
#include "numeric.cuh"

extern "C" __global__ void __launch_bounds__(256)
    swiglu(const uint16_t* y, int64_t ldy, uint16_t* out, int64_t ldo, int m, int n) {
    wait_for_previous_grid();
    const int column = blockIdx.x * 256 + threadIdx.x;
    if (column >= n) return;
    const int gate = column / 8 * 16 + column % 8;
    for (int row = blockIdx.y; row < m; row += gridDim.y) {
        const uint16_t* from = y + row * ldy + gate;
        out[row * ldo + column] = Type::from_float(silu(Type::to_float(from[0])) * Type::to_float(from[8]));
    }
}
