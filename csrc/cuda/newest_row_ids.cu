#include "common.cuh"

namespace hisparse {
namespace {

__global__ void __launch_bounds__(kNumThreads) newest_row_ids_kernel(
    const StepTables tables, const int32_t num_slots, const HotRows hot, int64_t* out  // [>= batch]
) {
    const int batch_row = blockIdx.x * kNumThreads + threadIdx.x;
    if (batch_row >= tables.batch) return;
    const int32_t seq_len = tables.seq_lens[batch_row];
    const int32_t first_block = tables.hot_tables[batch_row * tables.hot_table_stride];
    const bool is_padding = state_index(tables, first_block, seq_len) < 0;
    const int32_t slot = newest_slot(seq_len - 1, num_slots);
    const int64_t row = is_padding ? -1 : flat_hot_row(tables, hot, hot.rows_per_block, batch_row, slot);
    out[batch_row] = in_range(row, hot.num_rows) ? row : -1;
}

}  // namespace
}  // namespace hisparse

using namespace hisparse;

// Flat hot row of each request's newest position: `SwapInOps.newest_row_ids`. out: [>= batch] on the device.
extern "C" cudaError_t hisparse_newest_row_ids(
    const StepTables* tables, int32_t num_slots, const HotRows* hot, int64_t* out, cudaStream_t stream
) {
    if (tables->batch == 0) return cudaSuccess;
    const int num_blocks = (tables->batch + kNumThreads - 1) / kNumThreads;
    newest_row_ids_kernel<<<num_blocks, kNumThreads, 0, stream>>>(*tables, num_slots, *hot, out);
    return cudaGetLastError();
}
