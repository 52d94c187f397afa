#include "common.cuh"

namespace hisparse {

namespace {

constexpr int kWriteThreads = 128;

// One warp per request and KV head.
__global__ void __launch_bounds__(kWriteThreads) write_tokens_kernel(
    const NewTokens tokens,
    const DecodeMetadata decode,
    const HotRows hot,
    const HostRows host,
    int32_t* first_units  // [num_seqs]
) {
    const int lane = lane_index();
    const int head_index = (blockIdx.x * kWriteThreads + threadIdx.x) / kWarpSize;
    if (head_index >= decode.batch) return;
    const int32_t seq_index = find_seq(decode, head_index);
    if (seq_index < 0) return;
    const NewPositions added(decode, head_index, decode.num_hot_rows[seq_index]);
    const int batch_index = head_index / tokens.num_heads, head = head_index % tokens.num_heads;
    const bool has_moved = first_units[seq_index] != added.first;
    __syncwarp();
    if (lane == 0) first_units[seq_index] = added.first;
    for (int i = 0; i < tokens.max_query_len; ++i) {
        const int64_t num_tokens = tokens.num_tokens[static_cast<int64_t>(i) * tokens.max_batch + batch_index];
        if (num_tokens == 0) return;
        const int32_t unit = static_cast<int32_t>((num_tokens - 1) / tokens.tokens_per_unit);
        const int64_t target = flat_hot_row_id(decode, hot, hot.rows_per_block, seq_index, added.slot(unit));
        const int64_t home = flat_host_row_id(decode, decode.block_size, seq_index, unit);
        if (!in_range(target, hot.num_rows) || !in_range(home, host.num_rows)) continue;

        const int64_t offset = (num_tokens - 1) % tokens.tokens_per_unit * 2 * tokens.head_bytes;
        uint8_t* hot_unit = hot.rows + target * hot.row_bytes;
        uint8_t* host_unit = host.rows + home * host.row_bytes;
        if (i == 0 && has_moved && offset > 0) {
            copy_row<true>(hot_unit, host_unit, hot.row_bytes, lane);
            __syncwarp();
        }
        const int64_t place = static_cast<int64_t>(batch_index) * tokens.max_query_len + i;
        const uint8_t* key = tokens.keys + place * tokens.key_stride + head * tokens.head_bytes;
        const uint8_t* value = tokens.values + place * tokens.value_stride + head * tokens.head_bytes;
        copy_row<false>(hot_unit + offset, key, tokens.head_bytes, lane);
        copy_row<false>(hot_unit + offset + tokens.head_bytes, value, tokens.head_bytes, lane);
        copy_row<false>(host_unit + offset, key, tokens.head_bytes, lane);
        copy_row<false>(host_unit + offset + tokens.head_bytes, value, tokens.head_bytes, lane);
    }
}

}  // namespace
}  // namespace hisparse

using namespace hisparse;

cudaError_t hisparse::launch_write_tokens(
    const NewTokens& tokens,
    const DecodeMetadata& decode,
    const HotRows& hot,
    const HostRows& host,
    int32_t* first_units,
    cudaStream_t stream
) {
    if (decode.batch == 0) return cudaSuccess;
    const int num_blocks = (decode.batch * kWarpSize + kWriteThreads - 1) / kWriteThreads;
    write_tokens_kernel<<<num_blocks, kWriteThreads, 0, stream>>>(tokens, decode, hot, host, first_units);
    return cudaGetLastError();
}
