// Instructions that only compute capability 9.0 has, as wgmma.cu uses them: barriers that count bytes, copies of boxes
// by tensor maps, and products of a warpgroup with an operand in shared memory.
#pragma once
#include "ptx.cuh"

struct alignas(64) TensorMap {  // as cuTensorMapEncodeTiled fills it
    uint64_t opaque[16];
};

// ---- barriers in shared memory -------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes barriers just set up known to copies; other threads know them after the next __syncthreads.
__device__ __forceinline__ void barriers_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;\n fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and lets the phase end only when copies have brought that many bytes.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits for the end of a phase of this parity, if `wanted`. The loop is hidden from the compiler, which else takes
// what follows for divergent and gives up uniform registers.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity, bool wanted = true) {
    asm volatile(
        "{\n .reg .pred skip, done;\n setp.eq.u32 skip, %2, 0;\n @skip bra READY;\n"
        "AGAIN:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n @!done bra AGAIN;\n"
        "READY:\n}"
        :
        : "r"(barrier), "r"(parity), "r"(static_cast<uint32_t>(wanted))
        : "memory");
}
// Shared memory that threads wrote may be written by copies of boxes from here on (once a barrier tells the issuer).
__device__ __forceinline__ void hand_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A barrier of the first COUNT threads of a block, whole warps.
template <int COUNT>
__device__ __forceinline__ void sync_first() {
    asm volatile("bar.sync 1, %0;" ::"n"(COUNT) : "memory");
}

// The same by number, of as many threads.
template <int COUNT>
__device__ __forceinline__ void sync_some(int number) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(COUNT) : "memory");
}

// True in one lane of a warp, always the same; written so that the compiler knows that it is one.
__device__ __forceinline__ bool elected() {
    uint32_t yes;
    asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}" : "=r"(yes));
    return yes != 0;
}

// ---- copies of boxes -----------------------------------------------------------------------------------------------

// Copies the box at element (x, y) of a map, and counts its bytes in. What is out of bounds is zeros, and counts too.
__device__ __forceinline__ void copy_box(uint32_t to, const TensorMap* map, int x, int y, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2,%3}], [%4];"
        :
        : "r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}

// Copies a box of shared memory out, but for what is out of bounds: it is read when `boxes_read` returns to the thread that
// committed it, and other grids can see it after `boxes_written`.
__device__ __forceinline__ void store_box(const TensorMap* map, int x, int y, uint32_t from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1,%2}], [%3];"
                 :
                 : "l"(map), "r"(x), "r"(y), "r"(from)
                 : "memory");
}
__device__ __forceinline__ void boxes_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void boxes_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void boxes_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Asks for the map itself, ahead of the first copy by it.
__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---- registers -----------------------------------------------------------------------------------------------------

// Both must be executed by a whole warpgroup.
template <int COUNT>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- shared memory <-> registers -----------------------------------------------------------------------------------

__device__ __forceinline__ void load_shared(uint32_t (&to)[1], uint32_t from) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to[0]) : "r"(from));
}
__device__ __forceinline__ void load_shared(uint32_t (&to)[2], uint32_t from) {
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(from));
}

// Transposes one or two 8x8 matrices of 16-bit elements held across the warp as it stores them: lane i of each eight gives the
// address of row i.
__device__ __forceinline__ void store_transposed(uint32_t to, uint32_t a) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(to), "r"(a) : "memory");
}
__device__ __forceinline__ void store_transposed(uint32_t to, uint32_t a, uint32_t b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(to), "r"(a), "r"(b) : "memory");
}

// ---- products of a warpgroup ---------------------------------------------------------------------------------------

// Registers that products read or add to were written before this, by whatever else.
__device__ __forceinline__ void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Registers of products keep to their side of the fences above, which the compiler does not know to concern them.
template <int COUNT>
__device__ __forceinline__ void hold(float (&sums)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(sums[i])::"memory");
}
__device__ __forceinline__ void hold(uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) asm volatile("" : "+r"(a[i])::"memory");
}

// The B operand in shared memory: rows of 64 elements of k (128 bytes, 16-byte columns XOR-swizzled by the row), eight
// rows 1024 bytes apart from the next. 16 elements of k further the address is 32 bytes further.
__device__ __forceinline__ uint64_t operand_at(uint32_t address) {
    constexpr uint64_t EIGHT_ROWS = 1024 >> 4, SWIZZLE_128 = 1;
    return static_cast<uint64_t>(address >> 4) | 1ull << 16 | EIGHT_ROWS << 32 | SWIZZLE_128 << 62;
}

// d += a * b, or d = a * b where `FRESH`, in float32: a is 64 x 16 (of each warp's 16 rows four registers a lane, as in
// m16n8k16), b 16 x 16, 24, 32, 48, 64, 96 or 128.
// d[4i .. 4i+3] is rows g, g, g+8, g+8 and columns 8i + 2t, 8i + 2t + 1, and again.
#if BF16
#define PRODUCT_TYPES ".f32.bf16.bf16 "
#else
#define PRODUCT_TYPES ".f32.f16.f16 "
#endif
#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define EIGHT(i) FOUR(i), FOUR(i + 4)
#define SIXTEEN(i) EIGHT(i), EIGHT(i + 8)
template <bool FRESH>
__device__ __forceinline__ void product(float (&d)[8], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "{\n .reg .pred add;\n setp.eq.b32 add, %13, 0;\n wgmma.mma_async.sync.aligned.m64n16k16" PRODUCT_TYPES "{"
        "%0,%1,%2,%3,%4,%5,%6,%7"
        "}, {%8,%9,%10,%11}, %12, add, 1, 1, 0;\n}"
        : EIGHT(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(FRESH));
}
template <bool FRESH>
__device__ __forceinline__ void product(float (&d)[12], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "{\n .reg .pred add;\n setp.eq.b32 add, %17, 0;\n wgmma.mma_async.sync.aligned.m64n24k16" PRODUCT_TYPES "{"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11"
        "}, {%12,%13,%14,%15}, %16, add, 1, 1, 0;\n}"
        : EIGHT(0), FOUR(8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(FRESH));
}
template <bool FRESH>
__device__ __forceinline__ void product(float (&d)[16], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "{\n .reg .pred add;\n setp.eq.b32 add, %21, 0;\n wgmma.mma_async.sync.aligned.m64n32k16" PRODUCT_TYPES "{"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
        "}, {%16,%17,%18,%19}, %20, add, 1, 1, 0;\n}"
        : SIXTEEN(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(FRESH));
}
template <bool FRESH>
__device__ __forceinline__ void product(float (&d)[24], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "{\n .reg .pred add;\n setp.eq.b32 add, %29, 0;\n wgmma.mma_async.sync.aligned.m64n48k16" PRODUCT_TYPES "{"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23"
        "}, {%24,%25,%26,%27}, %28, add, 1, 1, 0;\n}"
        : SIXTEEN(0), EIGHT(16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(FRESH));
}
template <bool FRESH>
__device__ __forceinline__ void product(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "{\n .reg .pred add;\n setp.eq.b32 add, %37, 0;\n wgmma.mma_async.sync.aligned.m64n64k16" PRODUCT_TYPES "{"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
        "}, {%32,%33,%34,%35}, %36, add, 1, 1, 0;\n}"
        : SIXTEEN(0), SIXTEEN(16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(FRESH));
}
template <bool FRESH>
__device__ __forceinline__ void product(float (&d)[48], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "{\n .reg .pred add;\n setp.eq.b32 add, %53, 0;\n wgmma.mma_async.sync.aligned.m64n96k16" PRODUCT_TYPES "{"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
        "}, {%48,%49,%50,%51}, %52, add, 1, 1, 0;\n}"
        : SIXTEEN(0), SIXTEEN(16), SIXTEEN(32)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(FRESH));
}
template <bool FRESH>
__device__ __forceinline__ void product(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "{\n .reg .pred add;\n setp.eq.b32 add, %69, 0;\n wgmma.mma_async.sync.aligned.m64n128k16" PRODUCT_TYPES "{"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
        "}, {%64,%65,%66,%67}, %68, add, 1, 1, 0;\n}"
        : SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(FRESH));
}
#undef SIXTEEN
#undef EIGHT
#undef FOUR
#undef PRODUCT_TYPES
