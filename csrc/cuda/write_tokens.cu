#include "common.cuh"

namespace hisparse {

// New keys and values of the decoding requests, and where they belong.
struct NewTokens {
    const uint8_t* keys;    // [batch, num_heads, head_bytes], tokens key_stride bytes apart
    const uint8_t* values;  // [batch, num_heads, head_bytes], tokens value_stride bytes apart
    int64_t key_stride;
    int64_t value_stride;
    const int64_t* positions;  // [batch]
    int32_t num_heads;
    int32_t head_bytes;  // multiple of kVectorBytes
    int32_t tokens_per_unit;
};

namespace {

constexpr int kWriteThreads = 128;

// One warp per request and KV head.
__global__ void __launch_bounds__(kWriteThreads) write_tokens_kernel(
    const NewTokens tokens,
    const StepTables tables,
    const HotRows hot,
    const HostRows host,
    int32_t* reload  // [num_states]
) {
    const int lane = lane_index();
    const int head_index = (blockIdx.x * kWriteThreads + threadIdx.x) / kWarpSize;
    if (head_index >= tables.batch) return;
    const int32_t state_index = find_state(tables, head_index);
    if (state_index < 0) return;
    const NewPositions added(tables, head_index, tables.num_hot_rows[state_index]);
    const int64_t target = flat_hot_row_id(tables, hot, hot.rows_per_block, state_index, added.first_slot);
    const int64_t home = flat_host_row_id(tables, tables.block_size, state_index, added.first);
    if (!in_range(target, hot.num_rows) || !in_range(home, host.num_rows)) return;

    const int batch_index = head_index / tokens.num_heads, head = head_index % tokens.num_heads;
    const int64_t token_bytes = 2 * tokens.head_bytes;
    const int64_t offset = tokens.positions[batch_index] % tokens.tokens_per_unit * token_bytes;
    uint8_t* hot_unit = hot.rows + target * hot.row_bytes;
    uint8_t* host_unit = host.rows + home * host.row_bytes;
    if (reload[state_index]) {
        copy_row<true>(hot_unit, host_unit, hot.row_bytes, lane);
        __syncwarp();
        if (lane == 0) reload[state_index] = 0;
    }
    const uint8_t* key = tokens.keys + batch_index * tokens.key_stride + head * tokens.head_bytes;
    const uint8_t* value = tokens.values + batch_index * tokens.value_stride + head * tokens.head_bytes;
    copy_row<false>(hot_unit + offset, key, tokens.head_bytes, lane);
    copy_row<false>(hot_unit + offset + tokens.head_bytes, value, tokens.head_bytes, lane);
    copy_row<false>(host_unit + offset, key, tokens.head_bytes, lane);
    copy_row<false>(host_unit + offset + tokens.head_bytes, value, tokens.head_bytes, lane);
}

}  // namespace
}  // namespace hisparse

using namespace hisparse;

// Put new tokens into their units on the device and on the host: `SwapInOps.write_tokens`.
//
// tables: by KV head, tables->batch = batch * num_heads. reload: [num_states].
extern "C" cudaError_t hisparse_write_tokens(
    const NewTokens* tokens,
    const StepTables* tables,
    const HotRows* hot,
    const HostRows* host,
    int32_t* reload,
    cudaStream_t stream
) {
    if (tables->batch == 0) return cudaSuccess;
    const int num_blocks = (tables->batch * kWarpSize + kWriteThreads - 1) / kWriteThreads;
    write_tokens_kernel<<<num_blocks, kWriteThreads, 0, stream>>>(*tokens, *tables, *hot, *host, reload);
    return cudaGetLastError();
}
