// Instruction wrappers and fixed-width names. Nothing here knows about quantization.
//
// The kernels include no CUDA or standard header, so NVRTC needs no include path.
#pragma once

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

struct alignas(16) Vec4 {  // one 16-byte access
    uint32_t x, y, z, w;
};
struct alignas(16) Float4 {
    float x, y, z, w;
};

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// threadIdx.x, read anew: what is computed from it is computed where it is used, and takes no registers before that.
__device__ __forceinline__ int thread_anew() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// 16 bytes global -> shared, asynchronously. Only the first `bytes` are read; the rest is written as zeros,
// so an address that is out of range is legal with bytes = 0.
__device__ __forceinline__ void copy_async16(uint32_t to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// The same through L1, for what several warps of an SM read.
__device__ __forceinline__ void copy_async16_l1(uint32_t to, const void* from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Kernels of a stream overlap where the device can (compute capability 9.0): a grid may start while the one before it
// works. What that one wrote must not be read, and nothing written, before this. Weights were there before. The grid
// after this one may start from here on (once all of this one's blocks have come here): it waits for the end of this
// one, which comes after this one's own wait.
__device__ __forceinline__ void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n griddepcontrol.wait;" ::: "memory");
#endif
}

// Blocks of a cluster (compute capability 9.0 and up; elsewhere nothing is launched as one). A barrier of all their
// threads that have not exited has two halves: `begin` says that a block is there, and promises nothing of memory;
// `arrive` that what it stored in others' shared memory is there; `wait` ends either.
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void cluster_begin() { asm volatile("barrier.cluster.arrive.relaxed.aligned;"); }
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// The same place in the shared memory of the cluster's block `rank`.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, int rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
__device__ __forceinline__ void store_cluster(uint32_t to, const Float4& v) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
}
#else
__device__ __forceinline__ void cluster_begin() {}
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, int) { return address; }
__device__ __forceinline__ void store_cluster(uint32_t, const Float4&) {}
#endif

// Asks L2 for the 128 bytes at an address, and goes on.
__device__ __forceinline__ void prefetch_l2(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// Data another block wrote during this launch: past L1.
__device__ __forceinline__ Float4 load_l2(const Float4* from) {
    Float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* from) {
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}
// Counts this block in and returns how many came before it. One thread calls it, between two barriers: what any of the
// block's threads wrote before the first is seen by a block that finds the count, and what the blocks before wrote is
// seen after the second.
__device__ __forceinline__ uint32_t count_in(uint32_t* counter) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}
__device__ __forceinline__ void load_shared16(uint32_t (&to)[4], uint32_t from) {
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from));
}

// Four 8x8 matrices of 16-bit elements; lane i of each group of eight gives the address of row i.
__device__ __forceinline__ void load_matrix4(uint32_t (&r)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from));
}
// Transposes an 8x8 matrix of 16-bit elements held across the warp.
__device__ __forceinline__ uint32_t transpose8x8(uint32_t a) {
    uint32_t d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}

// (x & mask) | bits in one instruction.
template <uint32_t MASK, uint32_t BITS>
__device__ __forceinline__ uint32_t mask_or(uint32_t x) {
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(x), "n"(MASK), "n"(BITS));
    return d;
}

// Both 16-bit halves of the result are the low (high) half of x. Written so that ptxas makes it a modifier of the
// instruction that uses it (a __byte_perm stays one of its own).
__device__ __forceinline__ uint32_t broadcast_low(uint32_t x) {
    uint32_t d;
    asm("{\n .reg .b16 low, high;\n mov.b32 {low, high}, %1;\n mov.b32 %0, {low, low};\n}" : "=r"(d) : "r"(x));
    return d;
}
__device__ __forceinline__ uint32_t broadcast_high(uint32_t x) {
    uint32_t d;
    asm("{\n .reg .b16 low, high;\n mov.b32 {low, high}, %1;\n mov.b32 %0, {high, high};\n}" : "=r"(d) : "r"(x));
    return d;
}
