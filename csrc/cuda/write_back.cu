#include "common.cuh"

namespace hisparse {

constexpr int kMaxLayers = 128;  // of one launch: the pointers travel in the kernel's parameters

// Rows of each layer; all layers have the sizes of `HotRows` and `HostRows` next to it.
struct LayerRows {
    const uint8_t* hot[kMaxLayers];  // on the device
    uint8_t* host[kMaxLayers];       // in pinned host memory
};

namespace {

constexpr int kMaxBlocks = 32;  // the link is busy with these; the step's own kernels keep the rest

// One thread block per request at a time, one warp per layer.
__global__ void __launch_bounds__(kNumThreads) write_back_kernel(
    const __grid_constant__ LayerRows layers,
    const int32_t num_layers,
    const HotRows hot,          // `rows` is not read
    const int64_t num_host_rows,
    const StepTables tables,
    const int32_t num_slots
) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    for (int batch_row = blockIdx.x; batch_row < tables.batch; batch_row += gridDim.x) {
        const int32_t seq_len = tables.seq_lens[batch_row];
        const int32_t request = state_index(tables, tables.hot_tables[batch_row * tables.hot_table_stride], seq_len);
        if (request < 0) continue;
        const int32_t slot = newest_slot(seq_len - 1, num_slots);
        const int64_t source = flat_hot_row(tables, hot, hot.rows_per_block, batch_row, slot);
        const int64_t target = flat_host_row(tables, tables.block_size, request, seq_len - 1);
        if (!in_range(source, hot.num_rows) || !in_range(target, num_host_rows)) continue;
        for (int layer = warp; layer < num_layers; layer += kNumWarps) {
            const uint8_t* from = layers.hot[layer] + source * hot.row_bytes;
            copy_row<false>(layers.host[layer] + target * hot.row_bytes, from, hot.row_bytes, lane);
        }
    }
}

}  // namespace
}  // namespace hisparse

using namespace hisparse;

// Copy each request's newest row of up to kMaxLayers layers to the host: `SwapInOps.write_back`.
extern "C" cudaError_t hisparse_write_back(
    const LayerRows* layers,
    int32_t num_layers,
    const HotRows* hot,
    int64_t num_host_rows,
    const StepTables* tables,
    int32_t num_slots,
    cudaStream_t stream
) {
    if (tables->batch == 0) return cudaSuccess;
    if (num_layers > kMaxLayers) return cudaErrorInvalidValue;
    const int num_blocks = tables->batch < kMaxBlocks ? tables->batch : kMaxBlocks;
    write_back_kernel<<<num_blocks, kNumThreads, 0, stream>>>(
        *layers, num_layers, *hot, num_host_rows, *tables, num_slots
    );
    return cudaGetLastError();
}
