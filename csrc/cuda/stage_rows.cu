#include <algorithm>

#include "common.cuh"

namespace hisparse {
namespace {

constexpr int kMaxBlocks = 132;

// One warp per row.
__global__ void __launch_bounds__(kNumThreads) stage_rows_kernel(
    const HostRows host,
    const int32_t* __restrict__ host_block_table,  // [num_host_blocks]
    const int32_t num_host_blocks,
    const int32_t block_size,
    uint8_t* staging,  // [num_rows, row_bytes] on the device
    const int32_t num_rows,
    const int64_t row_bytes
) {
    const int warp = warp_index(), lane = lane_index();
    for (int row = blockIdx.x * kNumWarps + warp; row < num_rows; row += gridDim.x * kNumWarps) {
        const int64_t source = flat_row_id(host_block_table, num_host_blocks, row, block_size, block_size);
        if (!in_range(source, host.num_rows)) continue;
        copy_row<true>(staging + row * row_bytes, host.rows + source * row_bytes, row_bytes, lane);
    }
}

}  // namespace
}  // namespace hisparse

using namespace hisparse;

cudaError_t hisparse::launch_stage_rows(
    const HostRows& host,
    const int32_t* host_block_table,
    int32_t num_host_blocks,
    int32_t block_size,
    uint8_t* staging,
    int32_t num_rows,
    int64_t row_bytes,
    cudaStream_t stream
) {
    if (num_rows == 0) return cudaSuccess;
    const int num_blocks = std::min((num_rows + kNumWarps - 1) / kNumWarps, kMaxBlocks);
    stage_rows_kernel<<<num_blocks, kNumThreads, 0, stream>>>(
        host, host_block_table, num_host_blocks, block_size, staging, num_rows, row_bytes
    );
    return cudaGetLastError();
}
