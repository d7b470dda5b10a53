// native_int4: C[M, N] = A[M, K] @ W[K, N] (+ bias), one thread an output, any M, N, K and group size.
//
// The path that always works, and the reference that the fast kernels' speed-up is counted from. Threads of a warp
// take neighbouring columns, so reads of W are coalesced and A is broadcast; nothing is shared between outputs.
//
// Build constants: those of weight.cuh, and ROUNDING: 0 = the codes as they are; 1, 2 = as an iteration has them, by the
// channel frac4 or sign_bit (plain weights only). See rounding.cuh for `seed_key` and `phase`.
#include "rounding.cuh"
#include "weight.cuh"

extern "C" __global__ void __launch_bounds__(128)
    native_int4(const uint16_t* a, int64_t lda, const void* codes, const uint16_t* scales, const float* delta,
                const int* group_of, const uint16_t* bias, uint16_t* c, int64_t ldc, int m, int n, int k, int columns,
                int groups, int group_size, const uint8_t* channel, uint32_t seed_key, int phase) {
    wait_for_previous_grid();
    const Weight w = {codes, scales, delta, group_of, columns, groups, group_size};
    const int column = blockIdx.x * 128 + threadIdx.x;
    if (column >= n) return;
    const int64_t position = w.column(column);
    const uint32_t column_key = mix(column ^ seed_key);
    const auto code = [&](int i) {
        const int q = w.code(i, column);
        if (ROUNDING == 0) return q;
        const int side = channel[static_cast<int64_t>(i) * columns + column];
        const int at = threshold(i, column_key, phase);
        return ROUNDING == 1 ? frac4_code(q, side, at) : sign_bit_code(q, side, at);
    };
    for (int row = blockIdx.y; row < m; row += gridDim.y) {
        const uint16_t* x = a + row * lda;
        float sum = 0.f;
        if (group_of != nullptr) {
            for (int i = 0; i < k; i++) sum += Type::to_float(x[i]) * w.value(code(i), i, column);
        } else {
            for (int first = 0, group = 0; first < k; first += group_size, group++) {
                float dot = 0.f, x_sum = 0.f;  // over the group: x . (q - 8), and x alone
                for (int i = first; i < min(k, first + group_size); i++) {
                    const float value = Type::to_float(x[i]);
                    dot += value * static_cast<float>(code(i) - 8);
                    x_sum += value;
                }
                const int64_t at = w.row(group) + position;
                sum += dot * Type::to_float(scales[at]);
                if (delta != nullptr) sum += x_sum * delta[at];
            }
        }
        if (bias != nullptr) sum += Type::to_float(bias[column]);
        c[row * ldc + column] = Type::from_float(sum);
    }
}
