#include "common.cuh"

namespace hisparse {

constexpr int kMaxLayers = 128;  // of one launch: the pointers travel in the kernel's parameters

// Rows of each layer, of the sizes that a launch gives beside it. Pointers beyond its layers may be null.
struct LayerRows {
    const uint8_t* hot[kMaxLayers];  // [hot.num_rows, hot.row_bytes]
    uint8_t* host[kMaxLayers];       // [num_host_rows, hot.row_bytes] in pinned host memory
};

namespace {

constexpr int kMaxBlocks = 32;  // the link is busy with these; the step's own kernels keep the rest

// One thread block per request at a time, one warp per layer.
__global__ void __launch_bounds__(kNumThreads) write_back_kernel(
    const __grid_constant__ LayerRows layers,
    const int32_t num_layers,
    const HotRows hot,          // `rows` is not read
    const int64_t num_host_rows,
    const StepTables tables
) {
    const int warp = warp_index(), lane = lane_index();
    for (int batch_index = blockIdx.x; batch_index < tables.batch; batch_index += gridDim.x) {
        const int32_t state_index = find_state(tables, batch_index);
        if (state_index < 0) continue;
        const int32_t newest = tables.seq_lens[batch_index] - 1;
        const int32_t slot = newest_slot(newest, tables.num_hot_rows[state_index]);
        const int64_t source = flat_hot_row_id(tables, hot, hot.rows_per_block, state_index, slot);
        const int64_t target = flat_host_row_id(tables, tables.block_size, state_index, newest);
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
//
// hot: sizes of every layer; hot->rows is not read and may be null.
extern "C" cudaError_t hisparse_write_back(
    const LayerRows* layers,
    int32_t num_layers,
    const HotRows* hot,
    int64_t num_host_rows,
    const StepTables* tables,
    cudaStream_t stream
) {
    if (tables->batch == 0) return cudaSuccess;
    if (num_layers > kMaxLayers) return cudaErrorInvalidValue;
    const int num_blocks = tables->batch < kMaxBlocks ? tables->batch : kMaxBlocks;
    write_back_kernel<<<num_blocks, kNumThreads, 0, stream>>>(
        *layers, num_layers, *hot, num_host_rows, *tables
    );
    return cudaGetLastError();
}
