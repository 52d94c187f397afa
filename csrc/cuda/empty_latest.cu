#include <algorithm>

#include "common.cuh"

namespace hisparse {
namespace {

constexpr int kLatestThreads = 256;
constexpr int kTablesPerThread = 8;  // whose entries a thread reads at the same time

// Find the latest position of each request; or, if `kEmpties`, make the entries of its latest positions empty.
//
// A thread block has some blocks of one request (blockIdx.z) in some tables. A thread has the same entries in all these
// tables. `moved.latest` is written by the launch that finds, and read by the launch that empties.
template <bool kEmpties>
__global__ void __launch_bounds__(kLatestThreads) empty_latest_kernel(
    const ResidencyTables residency,
    const MovedRequests moved,
    const Divisor block_entries,
    const Divisor head_stride,
    const int32_t blocks_per_chunk,
    const int32_t num_latest
) {
    const int request = blockIdx.z;
    const int64_t seq_index = moved.seqs[request];
    const int64_t num_blocks = min(moved.num_blocks[request], static_cast<int64_t>(moved.num_hot_blocks));
    const int64_t first_block = static_cast<int64_t>(blockIdx.x) * blocks_per_chunk;
    if (seq_index < 0 || seq_index >= moved.num_seqs || first_block >= num_blocks) return;
    int32_t last_kept = -1;
    if constexpr (kEmpties) {
        last_kept = static_cast<int32_t>(max(moved.latest[request] - num_latest, static_cast<int64_t>(-1)));
    }
    const int32_t* blocks = moved.hot_block_tables + seq_index * moved.hot_block_table_stride + first_block;
    const auto num_own = static_cast<int32_t>(min(num_blocks - first_block, static_cast<int64_t>(blocks_per_chunk)));
    const int32_t num_entries = num_own * block_entries.divisor;
    const int32_t first_table = blockIdx.y * kTablesPerThread;
    const int32_t num_tables = min(residency.num_tables - first_table, kTablesPerThread);
    const int64_t table_stride = static_cast<int64_t>(residency.num_device_blocks) * block_entries.divisor;
    int32_t latest = -1;
    for (int32_t index = threadIdx.x; index < num_entries; index += kLatestThreads) {
        const int32_t part = __ldg(blocks + index / block_entries);
        if (part < 0 || part / head_stride >= residency.num_device_blocks) continue;
        const int64_t entry = static_cast<int64_t>(part / head_stride) * block_entries.divisor + index % block_entries;
        int2* own = residency.entries + first_table * table_stride + entry;
        int32_t held[kTablesPerThread];
#pragma unroll
        for (int i = 0; i < kTablesPerThread; ++i) held[i] = i < num_tables ? own[i * table_stride].x : -1;
#pragma unroll
        for (int i = 0; i < kTablesPerThread; ++i) {
            if constexpr (kEmpties) {
                if (held[i] > last_kept) own[i * table_stride].x = -1;  // not if there is no such table: it holds -1
            } else {
                latest = max(latest, held[i]);
            }
        }
    }
    if constexpr (!kEmpties) {
        __shared__ int32_t block_latest;
        if (threadIdx.x == 0) block_latest = -1;
        __syncthreads();
        latest = __reduce_max_sync(kAllLanes, latest);
        if (lane_index() == 0) atomicMax(&block_latest, latest);
        __syncthreads();
        if (threadIdx.x == 0 && block_latest >= 0) {
            atomicMax(reinterpret_cast<long long*>(moved.latest + request), static_cast<long long>(block_latest));
        }
    }
}

}  // namespace
}  // namespace hisparse

using namespace hisparse;

cudaError_t hisparse::launch_empty_latest(
    const ResidencyTables& residency, const MovedRequests& moved, int32_t num_latest, cudaStream_t stream
) {
    if (moved.num_requests == 0 || moved.most_blocks == 0 || residency.block_entries == 0) return cudaSuccess;
    const int32_t blocks_per_chunk = std::max(kLatestThreads / residency.block_entries, 1);
    const dim3 grid(
        (moved.most_blocks + blocks_per_chunk - 1) / blocks_per_chunk,
        (residency.num_tables + kTablesPerThread - 1) / kTablesPerThread, moved.num_requests
    );
    const Divisor block_entries(residency.block_entries), head_stride(moved.head_stride);
    empty_latest_kernel<false>
        <<<grid, kLatestThreads, 0, stream>>>(residency, moved, block_entries, head_stride, blocks_per_chunk, 0);
    empty_latest_kernel<true><<<grid, kLatestThreads, 0, stream>>>(
        residency, moved, block_entries, head_stride, blocks_per_chunk, num_latest
    );
    return cudaGetLastError();
}
