#include "common.cuh"

namespace hisparse {

namespace {

constexpr int kMaxBlocks = 32;  // they keep the link busy; the other multiprocessors are left to the step's kernels

// A thread block copies one new position at a time, with one warp per layer.
__global__ void __launch_bounds__(kNumThreads) write_back_kernel(
    const __grid_constant__ LayerRows layers,
    const int32_t num_layers,
    const HotRows hot,          // `rows` is not read
    const int64_t num_host_rows,
    const DecodeMetadata decode
) {
    const int warp = warp_index(), lane = lane_index();
    for (int index = blockIdx.x; index < decode.batch * decode.max_query_len; index += gridDim.x) {
        const int batch_index = index / decode.max_query_len;
        const int32_t seq_index = find_seq(decode, batch_index);
        if (seq_index < 0) continue;
        const NewPositions added(decode, batch_index, decode.num_hot_rows[seq_index]);
        const int32_t position = added.first + index % decode.max_query_len;
        if (position >= added.end) continue;
        const bool is_equal = has_equal_rows(decode, seq_index);
        const int32_t rows_per_block = is_equal ? hot.equal_rows_per_block : hot.rows_per_block;
        const int64_t num_rows = is_equal ? layers.num_equal_rows : hot.num_rows;
        const int64_t source = flat_hot_row_id(decode, hot, rows_per_block, seq_index, added.slot(position));
        const int64_t target = flat_host_row_id(decode, decode.block_size, seq_index, position);
        if (!in_range(source, num_rows) || !in_range(target, num_host_rows)) continue;
        for (int layer = warp; layer < num_layers; layer += kNumWarps) {
            const int64_t row = source + (is_equal ? layers.equal_offsets[layer] : 0);
            const uint8_t* from = layers.hot[layer] + row * hot.row_bytes;
            copy_row<false>(layers.host[layer] + target * hot.row_bytes, from, hot.row_bytes, lane);
        }
    }
}

}  // namespace
}  // namespace hisparse

using namespace hisparse;

cudaError_t hisparse::launch_write_back(
    const LayerRows& layers,
    int32_t num_layers,
    const HotRows& hot,
    int64_t num_host_rows,
    const DecodeMetadata& decode,
    cudaStream_t stream
) {
    if (decode.batch == 0) return cudaSuccess;
    const int num_rows = decode.batch * decode.max_query_len;
    const int num_blocks = num_rows < kMaxBlocks ? num_rows : kMaxBlocks;
    write_back_kernel<<<num_blocks, kNumThreads, 0, stream>>>(layers, num_layers, hot, num_host_rows, decode);
    return cudaGetLastError();
}
