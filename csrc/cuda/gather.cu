#include "common.cuh"

namespace hisparse {
namespace {

// Beside other kernels, fewer thread blocks run, because 64 would take multiprocessors from the other kernels.
constexpr int kBlocksAlone = 64, kBlocksShared = 8;

// Compute prefix sums: starts[i] is the first miss of request i, and starts[batch] the number of all misses.
// num_misses: [batch]. starts: [batch + 1] in shared memory. batch <= kNumThreads.
__device__ inline void scan_misses(const int32_t* num_misses, int batch, int32_t* starts) {
    __shared__ int32_t warp_sums[kNumWarps];
    const int warp = warp_index(), lane = lane_index();
    const bool exists = threadIdx.x < batch;
    int32_t sum = exists ? num_misses[threadIdx.x] : 0;
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const int32_t other = __shfl_up_sync(kAllLanes, sum, distance);
        if (lane >= distance) sum += other;
    }
    if (lane == kWarpSize - 1) warp_sums[warp] = sum;
    __syncthreads();
    sum += __reduce_add_sync(kAllLanes, lane < warp ? warp_sums[lane] : 0);
    if (exists) starts[threadIdx.x + 1] = sum;
    if (threadIdx.x == 0) starts[0] = 0;
    __syncthreads();
}

// Return the request of a miss: the last request whose first miss is not after it.
__device__ inline int request_of(const int32_t* starts, int batch, int miss) {
    int low = 0, high = batch - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (starts[middle] <= miss) low = middle;
        else high = middle - 1;
    }
    return low;
}

// One warp copies one row. Neighbouring misses go to different thread blocks, so that few misses use many
// multiprocessors.
__global__ void __launch_bounds__(kNumThreads, 2) gather_kernel(
    const HostRows host, const HotRows hot, const Resolved resolved, const int32_t batch
) {
    __shared__ int32_t starts[kNumThreads + 1];
    const int warp = warp_index(), lane = lane_index();
    wait_for_dependency();
    scan_misses(resolved.num_misses, batch, starts);
    for (int miss = warp * gridDim.x + blockIdx.x; miss < starts[batch]; miss += kNumWarps * gridDim.x) {
        const int request = request_of(starts, batch, miss);
        const int64_t at = static_cast<int64_t>(request) * resolved.num_columns + miss - starts[request];
        const int64_t source = resolved.miss_host_row_ids[at], target = resolved.miss_hot_row_ids[at];
        if (!in_range(source, host.num_rows) || !in_range(target, hot.num_rows)) continue;
        copy_row<true>(hot.rows + target * hot.row_bytes, host.rows + source * hot.row_bytes, hot.row_bytes, lane);
    }
}

}  // namespace
}  // namespace hisparse

using namespace hisparse;

cudaError_t hisparse::launch_gather(
    const HostRows& host,
    const HotRows& hot,
    const Resolved& resolved,
    int32_t batch,
    bool shares_device,
    bool after_resolve,
    cudaStream_t stream
) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = shares_device ? kBlocksShared : kBlocksAlone;
    config.blockDim = kNumThreads;
    config.stream = stream;
    config.attrs = &attribute;
    Resolved part = resolved;
    for (int32_t first = 0; first < batch; first += kNumThreads) {
        // NOTE: only the first launch may start early, because it waits for the resolution.
        config.numAttrs = after_resolve && first == 0 ? 1 : 0;
        const int32_t size = batch - first < kNumThreads ? batch - first : kNumThreads;
        if (const cudaError_t error = cudaLaunchKernelEx(&config, gather_kernel, host, hot, part, size)) return error;
        part.num_misses += kNumThreads;
        part.miss_host_row_ids += static_cast<int64_t>(kNumThreads) * part.num_columns;
        part.miss_hot_row_ids += static_cast<int64_t>(kNumThreads) * part.num_columns;
    }
    return cudaSuccess;
}
