#include "common.cuh"

namespace hisparse {
namespace {

__global__ void __launch_bounds__(kNumThreads) newest_row_ids_kernel(
    const DecodeMetadata decode, const HotRows hot, int64_t* out  // [>= batch, max_query_len]
) {
    const int index = blockIdx.x * kNumThreads + threadIdx.x;
    const int batch_index = index / decode.max_query_len;
    if (batch_index >= decode.batch) return;
    const int32_t seq_index = find_seq(decode, batch_index);
    int64_t row_id = -1;
    if (seq_index >= 0) {
        const NewPositions added(decode, batch_index, decode.num_hot_rows[seq_index]);
        const int32_t position = added.first + index % decode.max_query_len;
        if (position < added.end) {
            row_id = flat_hot_row_id(decode, hot, hot.rows_per_block, seq_index, added.slot(position));
        }
    }
    out[index] = in_range(row_id, hot.num_rows) ? row_id : -1;
}

}  // namespace
}  // namespace hisparse

using namespace hisparse;

cudaError_t hisparse::launch_newest_row_ids(
    const DecodeMetadata& decode, const HotRows& hot, int64_t* out, cudaStream_t stream
) {
    if (decode.batch == 0) return cudaSuccess;
    const int num_blocks = (decode.batch * decode.max_query_len + kNumThreads - 1) / kNumThreads;
    newest_row_ids_kernel<<<num_blocks, kNumThreads, 0, stream>>>(decode, hot, out);
    return cudaGetLastError();
}
