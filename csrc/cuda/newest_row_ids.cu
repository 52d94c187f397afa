#include "common.cuh"

namespace hisparse {
namespace {

__global__ void __launch_bounds__(kNumThreads) newest_row_ids_kernel(
    const DecodeMetadata decode,
    const HotRows hot,
    const int32_t* equal_offsets,  // [num_layers]; null: those of `hot`
    const int32_t num_layers,
    int64_t* out,  // [num_layers, >= batch, max_query_len], layers out_stride elements apart
    const int64_t out_stride
) {
    const int index = blockIdx.x * kNumThreads + threadIdx.x;
    const int batch_index = index / decode.max_query_len;
    if (batch_index >= decode.batch) return;
    const int32_t seq_index = find_seq(decode, batch_index);
    const bool is_equal = seq_index >= 0 && has_equal_rows(decode, seq_index);
    int64_t row_id = -1;
    if (seq_index >= 0) {
        const NewPositions added(decode, batch_index, decode.num_hot_rows[seq_index]);
        const int32_t position = added.first + index % decode.max_query_len;
        const int32_t rows_per_block = is_equal ? hot.equal_rows_per_block : hot.rows_per_block;
        if (position < added.end) {
            row_id = flat_hot_row_id(decode, hot, rows_per_block, seq_index, added.slot(position));
        }
    }
    const bool is_known = in_range(row_id, hot.num_rows - (is_equal ? hot.equal_offset : 0));
    for (int layer = 0; layer < num_layers; ++layer) {
        const int32_t equal_offset = equal_offsets == nullptr ? hot.equal_offset : __ldg(equal_offsets + layer);
        out[layer * out_stride + index] = is_known ? row_id + (is_equal ? equal_offset : 0) : -1;
    }
}

}  // namespace
}  // namespace hisparse

using namespace hisparse;

cudaError_t hisparse::launch_newest_row_ids(
    const DecodeMetadata& decode,
    const HotRows& hot,
    const int32_t* equal_offsets,
    int32_t num_layers,
    int64_t* out,
    int64_t out_stride,
    cudaStream_t stream
) {
    if (decode.batch == 0) return cudaSuccess;
    const int num_blocks = (decode.batch * decode.max_query_len + kNumThreads - 1) / kNumThreads;
    newest_row_ids_kernel<<<num_blocks, kNumThreads, 0, stream>>>(
        decode, hot, equal_offsets, num_layers, out, out_stride
    );
    return cudaGetLastError();
}
