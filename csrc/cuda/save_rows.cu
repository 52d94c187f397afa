#include <algorithm>

#include "common.cuh"

namespace hisparse {
namespace {

constexpr int kMaxBlocks = 64;

// One warp per row.
__global__ void __launch_bounds__(kNumThreads) save_rows_kernel(
    const uint8_t* rows,  // [num_rows, row_bytes] on the device
    const int32_t first,
    const int32_t num_rows,
    const int64_t row_bytes,
    const HostRows host,
    const int32_t* __restrict__ host_block_table,  // [num_host_blocks]
    const int32_t num_host_blocks,
    const int32_t block_size
) {
    const int warp = warp_index(), lane = lane_index();
    for (int row = blockIdx.x * kNumWarps + warp; row < num_rows; row += gridDim.x * kNumWarps) {
        const int64_t target = flat_row_id(host_block_table, num_host_blocks, first + row, block_size, block_size);
        if (!in_range(target, host.num_rows)) continue;
        copy_row<false>(host.rows + target * row_bytes, rows + row * row_bytes, row_bytes, lane);
    }
}

}  // namespace
}  // namespace hisparse

using namespace hisparse;

cudaError_t hisparse::launch_save_rows(
    const uint8_t* rows,
    int32_t first,
    int32_t num_rows,
    int64_t row_bytes,
    const HostRows& host,
    const int32_t* host_block_table,
    int32_t num_host_blocks,
    int32_t block_size,
    cudaStream_t stream
) {
    if (num_rows == 0) return cudaSuccess;
    const int num_blocks = std::min((num_rows + kNumWarps - 1) / kNumWarps, kMaxBlocks);
    save_rows_kernel<<<num_blocks, kNumThreads, 0, stream>>>(
        rows, first, num_rows, row_bytes, host, host_block_table, num_host_blocks, block_size
    );
    return cudaGetLastError();
}
