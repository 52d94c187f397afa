#include "common.cuh"

namespace hisparse {
namespace {

constexpr int kCompactThreads = 256;
constexpr int kCompactWarps = kCompactThreads / kWarpSize;

// One thread block per selection moves ids in rounds. A round only reads ids behind those that earlier rounds have
// written.
__global__ void __launch_bounds__(kCompactThreads) compact_rows_kernel(
    int32_t* row_ids,    // [num_selections, num_columns]
    int32_t* num_valid,  // [num_selections]
    const int32_t num_columns
) {
    __shared__ int32_t warp_counts[kCompactWarps];
    const int warp = warp_index(), lane = lane_index();
    int32_t* own = row_ids + static_cast<int64_t>(blockIdx.x) * num_columns;
    const int32_t num_leading = min(num_valid[blockIdx.x], num_columns);
    int32_t num_kept = 0;
    for (int first = 0; first < num_leading; first += kCompactThreads) {
        const int index = first + static_cast<int>(threadIdx.x);
        const int32_t id = index < num_leading ? own[index] : -1;
        const uint32_t valid = __ballot_sync(kAllLanes, id >= 0);
        if (lane == 0) warp_counts[warp] = __popc(valid);
        __syncthreads();  // all ids of the round have been read by now
        const int32_t counted = lane < kCompactWarps ? warp_counts[lane] : 0;
        const int32_t before = __reduce_add_sync(kAllLanes, lane < warp ? counted : 0);
        const int32_t place = num_kept + before + __popc(valid & ((1u << lane) - 1));
        if (id >= 0 && place != index) own[place] = id;
        num_kept += __reduce_add_sync(kAllLanes, counted);
        __syncthreads();
    }
    for (int index = num_kept + static_cast<int>(threadIdx.x); index < num_leading; index += kCompactThreads) {
        own[index] = -1;
    }
    if (threadIdx.x == 0) num_valid[blockIdx.x] = num_kept;
}

}  // namespace
}  // namespace hisparse

using namespace hisparse;

cudaError_t hisparse::launch_compact_rows(
    int32_t* row_ids, int32_t* num_valid, int32_t num_selections, int32_t num_columns, cudaStream_t stream
) {
    if (num_selections == 0) return cudaSuccess;
    compact_rows_kernel<<<num_selections, kCompactThreads, 0, stream>>>(row_ids, num_valid, num_columns);
    return cudaGetLastError();
}
