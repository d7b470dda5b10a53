// The two activation types, and how a 4-bit code becomes one of them.
//
// Type names a 16-bit element (`fp16` or `bf16`); a pair is two of them in one 32-bit register. Every kernel is
// compiled for one type, chosen by -DBF16=0|1, and calls only `Type::`.
#pragma once
#include "ptx.cuh"

struct Fp16 {
    static __device__ __forceinline__ float to_float(uint16_t x) {
        float f;
        asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x));
        return f;
    }
    static __device__ __forceinline__ uint16_t from_float(float f) {
        uint16_t x;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x) : "f"(f));
        return x;
    }
    static __device__ __forceinline__ uint32_t pair(float low, float high) {
        return from_float(low) | (static_cast<uint32_t>(from_float(high)) << 16);
    }
    static __device__ __forceinline__ uint32_t add(uint32_t a, uint32_t b) {
        uint32_t d;
        asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
        return d;
    }
    static __device__ __forceinline__ uint32_t mul(uint32_t a, uint32_t b) {
        uint32_t d;
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
        return d;
    }
    static __device__ __forceinline__ uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
        uint32_t d;
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
        return d;
    }

    // Register R of the mma A fragment of q - z, exactly, from one word of B:
    // R = 0: (n = g; k = 2t, 2t+1)   R = 1: (n = g+8; same k)   R = 2, 3: the same columns at k + 8.
    // 0x6400 is 1024, whose last place is 1: OR-ing a nibble into bits 0..3 gives 1024 + q, into bits 4..7 1024 + 16 q.
    // `minus` is -(1024 + z) for the former (R < 2), and -(64 + z) for a sixteenth of the latter.
    template <int R>
    static __device__ __forceinline__ uint32_t code(uint32_t q, uint32_t minus) {
        if (R % 2) q >>= 8;
        const uint32_t sixteenth = 0x2c002c00;
        if (R < 2) return add(mask_or<0x000f000f, 0x64006400>(q), minus);
        return fma(mask_or<0x00f000f0, 0x64006400>(q), sixteenth, minus);
    }
    static constexpr uint32_t MINUS_8 = 0xe408e408, MINUS_8_UPPER = 0xd480d480;  // for z = 8: R < 2, R >= 2
    static __device__ __forceinline__ uint32_t upper(uint32_t minus) { return add(minus, 0x63806380); }  // + 960

    static constexpr uint32_t ONES = 0x3c003c00;

    // d += a (16 x 16, rows n) * b (16 x 8, columns m), float32 accumulators; d = a * b where `fresh`.
    static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                               bool fresh = false) {
        asm(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(fresh ? 0.f : d[0]),
              "f"(fresh ? 0.f : d[1]), "f"(fresh ? 0.f : d[2]), "f"(fresh ? 0.f : d[3]));
    }
};

struct Bf16 {
    static __device__ __forceinline__ float to_float(uint16_t x) {
        return __uint_as_float(static_cast<uint32_t>(x) << 16);
    }
    static __device__ __forceinline__ uint16_t from_float(float f) {
        uint16_t x;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(x) : "f"(f));
        return x;
    }
    static __device__ __forceinline__ uint32_t pair(float low, float high) {
        uint32_t d;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
        return d;
    }
    // sm_80 has only fma for bf16 pairs.
    static __device__ __forceinline__ uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
        uint32_t d;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
        return d;
    }
    static __device__ __forceinline__ uint32_t mul(uint32_t a, uint32_t b) { return fma(a, b, 0x80008000); }

    // As Fp16::code. bf16 has 7 mantissa bits: only a nibble in bits 0..3 can be read, as 128 + q, so each of the four
    // pairs is shifted down, and `minus` is -(128 + z) for all.
    template <int R>
    static __device__ __forceinline__ uint32_t code(uint32_t q, uint32_t minus) {
        return fma(mask_or<0x000f000f, 0x43004300>(q >> (R % 2 * 8 + R / 2 * 4)), ONES, minus);
    }
    static constexpr uint32_t MINUS_8 = 0xc308c308, MINUS_8_UPPER = MINUS_8;
    static __device__ __forceinline__ uint32_t upper(uint32_t minus) { return minus; }

    static constexpr uint32_t ONES = 0x3f803f80;

    static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                               bool fresh = false) {
        asm(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(fresh ? 0.f : d[0]),
              "f"(fresh ? 0.f : d[1]), "f"(fresh ? 0.f : d[2]), "f"(fresh ? 0.f : d[3]));
    }
};

template <int IS_BF16>
struct TypeOf {
    using type = Fp16;
};
template <>
struct TypeOf<1> {
    using type = Bf16;
};
using Type = TypeOf<BF16>::type;

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

template <int R>
__device__ __forceinline__ uint32_t centered(uint32_t q) {
    return Type::code<R>(q, R < 2 ? Type::MINUS_8 : Type::MINUS_8_UPPER);
}
// The whole fragment of q - 8.
__device__ __forceinline__ void centered(uint32_t (&a)[4], uint32_t q) {
    a[0] = centered<0>(q), a[1] = centered<1>(q), a[2] = centered<2>(q), a[3] = centered<3>(q);
}

// Integer zero points of the columns n = g and n + 8, as they are added to codes: see Type::code.
struct ZeroPoints {
    uint32_t lower, upper;
};
__device__ __forceinline__ ZeroPoints zero_points(uint32_t minus) { return {minus, Type::upper(minus)}; }
template <int R>
__device__ __forceinline__ uint32_t shifted(uint32_t q, const ZeroPoints& z) {
    const uint32_t pair = R < 2 ? z.lower : z.upper;
    return Type::code<R>(q, R % 2 ? broadcast_high(pair) : broadcast_low(pair));
}
// The whole fragment of q - z.
__device__ __forceinline__ void shifted(uint32_t (&a)[4], uint32_t q, const ZeroPoints& z) {
    a[0] = shifted<0>(q, z), a[1] = shifted<1>(q, z), a[2] = shifted<2>(q, z), a[3] = shifted<3>(q, z);
}
