#include "common.cuh"

namespace hisparse {

// New keys and values of the decoding requests: [batch, num_heads, head_bytes], tokens token_stride bytes apart.
struct NewTokens {
    const uint8_t* keys;
    const uint8_t* values;
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
    const int32_t num_slots,
    int32_t* reload  // [num_requests]
) {
    const int lane = threadIdx.x % kWarpSize;
    const int row = (blockIdx.x * kWriteThreads + threadIdx.x) / kWarpSize;
    if (row >= tables.batch) return;
    const int32_t num_units = tables.seq_lens[row];
    const int32_t request = state_index(tables, tables.hot_tables[row * tables.hot_table_stride], num_units);
    if (request < 0) return;
    const int64_t target = flat_hot_row(tables, hot, hot.rows_per_block, row, newest_slot(num_units - 1, num_slots));
    const int64_t home = flat_host_row(tables, tables.block_size, request, num_units - 1);
    if (!in_range(target, hot.num_rows) || !in_range(home, host.num_rows)) return;

    const int batch_row = row / tokens.num_heads, head = row % tokens.num_heads;
    const int64_t token_bytes = 2 * tokens.head_bytes;
    const int64_t offset = tokens.positions[batch_row] % tokens.tokens_per_unit * token_bytes;
    uint8_t* hot_unit = hot.rows + target * hot.row_bytes;
    uint8_t* host_unit = host.rows + home * host.row_bytes;
    if (reload[request]) {
        copy_row<true>(hot_unit, host_unit, hot.row_bytes, lane);
        __syncwarp();
        if (lane == 0) reload[request] = 0;
    }
    const uint8_t* key = tokens.keys + batch_row * tokens.key_stride + head * tokens.head_bytes;
    const uint8_t* value = tokens.values + batch_row * tokens.value_stride + head * tokens.head_bytes;
    copy_row<false>(hot_unit + offset, key, tokens.head_bytes, lane);
    copy_row<false>(hot_unit + offset + tokens.head_bytes, value, tokens.head_bytes, lane);
    copy_row<false>(host_unit + offset, key, tokens.head_bytes, lane);
    copy_row<false>(host_unit + offset + tokens.head_bytes, value, tokens.head_bytes, lane);
}

}  // namespace
}  // namespace hisparse

using namespace hisparse;

// Put new tokens into their units on the device and on the host: `SwapInOps.write_tokens`. reload: [num_requests].
extern "C" cudaError_t hisparse_write_tokens(
    const NewTokens* tokens,
    const StepTables* tables,
    const HotRows* hot,
    const HostRows* host,
    int32_t num_slots,
    int32_t* reload,
    cudaStream_t stream
) {
    if (tables->batch == 0) return cudaSuccess;
    const int num_blocks = (tables->batch * kWarpSize + kWriteThreads - 1) / kWriteThreads;
    write_tokens_kernel<<<num_blocks, kWriteThreads, 0, stream>>>(*tokens, *tables, *hot, *host, num_slots, reload);
    return cudaGetLastError();
}
