// The best positions of each query by score, by a radix select in a cluster of thread blocks.
#include "common.cuh"

namespace hisparse {
namespace {

constexpr int kSelectThreads = 512;
constexpr int kSelectWarps = kSelectThreads / kWarpSize;
constexpr int kMaxSelectBlocks = 8;  // thread blocks of a cluster; no larger cluster is portable
constexpr int kBusyBlocks = 128;  // thread blocks of a launch that keep a GPU busy
constexpr int kCachedKeys = 16384;  // keys that a thread block keeps in shared memory, if it has no more
constexpr int kDigits = 3;  // of a key
constexpr int kBins = 2048;
constexpr int kBinsPerThread = kBins / kSelectThreads;
constexpr int kStep = 4 * kWarpSize;  // keys that a warp reads at once

static_assert(kBinsPerThread == 4, "a thread reads its bins at once");

__device__ __forceinline__ int digit_bits(int digit) {
    return digit < kDigits - 1 ? 11 : 10;
}

__device__ __forceinline__ int digit_shift(int digit) {
    return digit == 0 ? 21 : digit == 1 ? 10 : 0;
}

struct alignas(16) SelectScratch {
    int32_t histograms[kDigits][kBins];
    int2 counts[kSelectWarps];  // keys of each warp: x below the threshold, y equal to it
    int32_t sums[kSelectWarps];
    int32_t bin;
    int32_t num_before;
};

// Return a key whose unsigned order is the descending order of the scores.
__device__ __forceinline__ uint32_t descending_key(float score) {
    const uint32_t bits = __float_as_uint(score);
    return bits & 0x80000000 ? bits : ~bits & 0x7fffffff;
}

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}

__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Return the address in the shared memory of another block of the cluster that is `own` in this block.
__device__ __forceinline__ uint32_t address_in(const void* own, int rank) {
    uint32_t address = 0;
#if __CUDA_ARCH__ >= 900
    const auto here = static_cast<uint32_t>(__cvta_generic_to_shared(own));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(here), "r"(rank));
#endif
    return address;
}

__device__ __forceinline__ int4 read4(const int4* own, int rank) {
    int4 value{};
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address_in(own, rank))
                 : "memory");
#endif
    return value;
}

__device__ __forceinline__ int2 read2(const int2* own, int rank) {
    int2 value{};
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.v2.s32 {%0, %1}, [%2];"
                 : "=r"(value.x), "=r"(value.y)
                 : "r"(address_in(own, rank))
                 : "memory");
#endif
    return value;
}

__device__ __forceinline__ int32_t sum_up_to_lane(int32_t value) {
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const int32_t other = __shfl_up_sync(kAllLanes, value, distance);
        if (lane_index() >= distance) value += other;
    }
    return value;
}

// The keys of one query. Each warp of the cluster has consecutive ones, in the order of the positions.
struct WarpKeys {
    const float* scores;  // of the query
    uint4* cached;  // this warp's keys in shared memory; null if there are too many
    int first;  // this warp's positions
    int end;

    // Return four keys from a position on; those from `end` on are anything.
    __device__ __forceinline__ uint4 read(int position) const {
        if (cached != nullptr) return cached[(position - first) / 4];
        const float4 four = *reinterpret_cast<const float4*>(scores + position);
        return {descending_key(four.x), descending_key(four.y), descending_key(four.z), descending_key(four.w)};
    }
    __device__ __forceinline__ void fill_cache() {
        uint4* own = cached;
        if (own == nullptr) return;
        cached = nullptr;
        for (int i = first + 4 * lane_index(); i < end; i += kStep) own[(i - first) / 4] = read(i);
        cached = own;
        __syncwarp();
    }
    // Call `visit(position, key)` for this lane's keys.
    template <typename Visit>
    __device__ __forceinline__ void visit(const Visit& visit_key) const {
        for (int i = first + 4 * lane_index(); i < end; i += kStep) {
            const uint4 keys = read(i);
            visit_key(i, keys.x);
            if (i + 1 < end) visit_key(i + 1, keys.y);
            if (i + 2 < end) visit_key(i + 2, keys.z);
            if (i + 3 < end) visit_key(i + 3, keys.w);
        }
    }
};

// Find the bin of the key of rank `num_left` - 1 in the sum of the cluster's histograms: scratch.bin; and the number of
// keys in the bins before it: scratch.num_before. Called by all threads; all blocks find the same.
__device__ __forceinline__ void find_bin(SelectScratch& scratch, int digit, int num_blocks, int32_t num_left) {
    const auto* own = reinterpret_cast<const int4*>(scratch.histograms[digit]) + threadIdx.x;
    int4 bins{};
#pragma unroll
    for (int rank = 0; rank < kMaxSelectBlocks; ++rank) {
        if (rank >= num_blocks) break;
        const int4 more = read4(own, rank);
        bins.x += more.x;
        bins.y += more.y;
        bins.z += more.z;
        bins.w += more.w;
    }
    const int32_t sum = bins.x + bins.y + bins.z + bins.w;
    const int32_t up_to_lane = sum_up_to_lane(sum);
    if (lane_index() == kWarpSize - 1) scratch.sums[warp_index()] = up_to_lane;
    __syncthreads();
    const int32_t warps_before = lane_index() < warp_index() ? scratch.sums[lane_index()] : 0;
    int32_t before = __reduce_add_sync(kAllLanes, warps_before) + up_to_lane - sum;
    if (before < num_left && num_left <= before + sum) {
        int bin = 4 * static_cast<int>(threadIdx.x);
        for (const int32_t count : {bins.x, bins.y, bins.z}) {
            if (num_left <= before + count) break;
            before += count;
            ++bin;
        }
        scratch.bin = bin;
        scratch.num_before = before;
    }
    __syncthreads();
}

// Return the numbers of keys below and equal to the threshold in the cluster's warps before this one.
__device__ __forceinline__ int2 counts_before(const SelectScratch& scratch, int rank) {
    const int warp = rank * kSelectWarps + warp_index();
    int2 sum{};
    for (int i = lane_index(); i < warp; i += kWarpSize) {
        const int2 more = read2(scratch.counts + i % kSelectWarps, i / kSelectWarps);
        sum.x += more.x;
        sum.y += more.y;
    }
    return {__reduce_add_sync(kAllLanes, sum.x), __reduce_add_sync(kAllLanes, sum.y)};
}

// One cluster per query. It finds the key of rank top_k - 1, digit by digit, and writes the positions of better keys in
// ascending order, then the first positions with this key.
__global__ void __launch_bounds__(kSelectThreads) select_positions_kernel(
    const float* __restrict__ scores,  // queries scores_stride elements apart
    const int64_t scores_stride,
    const int32_t* __restrict__ lengths,  // [num_queries]
    const int num_blocks,  // of a cluster
    const int32_t top_k,
    int32_t* positions,  // queries positions_stride elements apart
    const int64_t positions_stride
) {
    extern __shared__ uint4 cache[];
    __shared__ SelectScratch scratch;
    const int64_t query = blockIdx.x / num_blocks;
    const int rank = static_cast<int>(cluster_rank());
    const int32_t length = lengths[query];
    int32_t* const out = positions + query * positions_stride;
    if (length <= top_k) {  // for all blocks of the cluster
        for (int i = rank * kSelectThreads + threadIdx.x; i < top_k; i += num_blocks * kSelectThreads) {
            out[i] = i < length ? i : -1;
        }
        return;
    }
    auto* const bins = &scratch.histograms[0][0];
    for (int i = threadIdx.x; i < kDigits * kBins; i += kSelectThreads) bins[i] = 0;
    const int num_warps = num_blocks * kSelectWarps;
    const int span = ((length + num_warps - 1) / num_warps + kStep - 1) / kStep * kStep;
    const int first = min((rank * kSelectWarps + warp_index()) * span, length);
    const bool is_cached = span * kSelectWarps <= kCachedKeys;
    WarpKeys keys{
        scores + query * scores_stride, is_cached ? cache + warp_index() * (span / 4) : nullptr, first,
        min(first + span, length)
    };
    keys.fill_cache();
    __syncthreads();

    uint32_t threshold = 0;
    int32_t num_left = top_k;
    for (int digit = 0; digit < kDigits; ++digit) {
        const int shift = digit_shift(digit), bits = digit_bits(digit);
        keys.visit([&](int, uint32_t key) {
            if (digit > 0 && key >> (shift + bits) != threshold) return;
            atomicAdd(scratch.histograms[digit] + (key >> shift & ((1u << bits) - 1)), 1);
        });
        cluster_sync();
        find_bin(scratch, digit, num_blocks, num_left);
        threshold = threshold << bits | static_cast<uint32_t>(scratch.bin);
        num_left -= scratch.num_before;
    }

    int2 counts{};
    keys.visit([&](int, uint32_t key) {
        counts.x += key < threshold;
        counts.y += key == threshold;
    });
    counts = {__reduce_add_sync(kAllLanes, counts.x), __reduce_add_sync(kAllLanes, counts.y)};
    if (lane_index() == 0) scratch.counts[warp_index()] = counts;
    cluster_sync();
    int2 place = counts_before(scratch, rank);
    const int32_t num_better = top_k - num_left;
    for (int start = keys.first; start < keys.end; start += kStep) {
        const int position = start + 4 * lane_index();
        const uint4 four = position < keys.end ? keys.read(position) : uint4{~0u, ~0u, ~0u, ~0u};
        const uint32_t each[4] = {four.x, four.y, four.z, four.w};
        int2 own{};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            own.x += position + i < keys.end && each[i] < threshold;
            own.y += position + i < keys.end && each[i] == threshold;
        }
        const int2 up_to_lane{sum_up_to_lane(own.x), sum_up_to_lane(own.y)};
        int2 next{place.x + up_to_lane.x - own.x, place.y + up_to_lane.y - own.y};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (position + i >= keys.end) break;
            if (each[i] < threshold) {
                out[next.x++] = position + i;
            } else if (each[i] == threshold && next.y < num_left) {
                out[num_better + next.y++] = position + i;
            }
        }
        place.x += __shfl_sync(kAllLanes, up_to_lane.x, kWarpSize - 1);
        place.y += __shfl_sync(kAllLanes, up_to_lane.y, kWarpSize - 1);
    }
    cluster_sync();  // other blocks may still read this block's counts
}

// Return the thread blocks of a query's cluster.
int blocks_of(int32_t num_queries) {
    int blocks = kMaxSelectBlocks;
    while (blocks > 1 && blocks * num_queries > kBusyBlocks) blocks /= 2;
    return blocks;
}

}  // namespace
}  // namespace hisparse

using namespace hisparse;

cudaError_t hisparse::launch_select_positions(
    const float* scores,
    int64_t scores_stride,
    const int32_t* lengths,
    int32_t num_queries,
    int32_t top_k,
    int32_t* positions,
    int64_t positions_stride,
    cudaStream_t stream
) {
    if (num_queries == 0) return cudaSuccess;
    constexpr int kCacheBytes = kCachedKeys * sizeof(uint32_t);
    static const cudaError_t allowed =
        cudaFuncSetAttribute(select_positions_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kCacheBytes);
    if (allowed) return allowed;
    const int num_blocks = blocks_of(num_queries);
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(num_blocks), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<unsigned>(num_queries * num_blocks);
    config.blockDim = kSelectThreads;
    config.dynamicSmemBytes = kCacheBytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(
        &config, select_positions_kernel, scores, scores_stride, lengths, num_blocks, top_k, positions, positions_stride
    );
}
