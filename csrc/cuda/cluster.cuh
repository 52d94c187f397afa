// Thread block clusters: blocks that run at the same time and read each other's shared memory.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

namespace hisparse {

constexpr int kMaxClusterSize = 4;

// The cluster of this thread block. Without clusters, it has one block, and its barriers cost nothing.
template <bool kIsCluster>
struct Cluster {
    int rank;  // rank of this thread block in the cluster
    int size;

    __device__ Cluster() : rank(0), size(1) {
#if __CUDA_ARCH__ >= 900
        if constexpr (kIsCluster) {
            asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
            asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
        }
#endif
    }
    // All blocks that have waited see everything that a block wrote to its shared memory before it arrived.
    // NOTE: `arrive.release` is not used, because it would wait for writes to global memory, too.
    __device__ void arrive() const {
#if __CUDA_ARCH__ >= 900
        if constexpr (kIsCluster) {
            asm volatile("fence.release.sync_restrict::shared::cta.cluster;" ::: "memory");
            asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
        }
#endif
    }
    __device__ void wait() const {
#if __CUDA_ARCH__ >= 900
        if constexpr (kIsCluster) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
    }
    __device__ void sync() const {
        arrive();
        wait();
    }
    // Read the 32 bits of shared memory of each block that are at the address of `own` in this block; 0 if there is no
    // block.
    // NOTE: all loads are in flight at the same time.
    template <typename T>
    __device__ void read(const T* own, T (&values)[kMaxClusterSize]) const {
        static_assert(sizeof(T) == sizeof(uint32_t));
#pragma unroll
        for (int i = 0; i < kMaxClusterSize; ++i) values[i] = i < size ? read(own, i) : T{0};
    }

private:
    template <typename T>
    __device__ static T read(const T* own, int of_rank) {
        uint32_t value = 0;
#if __CUDA_ARCH__ >= 900
        const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(own));
        uint32_t other = 0;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(other) : "r"(address), "r"(of_rank));
        asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(other) : "memory");
#endif
        return static_cast<T>(value);
    }
};

}  // namespace hisparse
