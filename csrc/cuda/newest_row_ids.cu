#include "common.cuh"

namespace hisparse {
namespace {

__global__ void __launch_bounds__(kNumThreads) newest_row_ids_kernel(
    const StepTables tables, const int32_t num_slots, const HotRows hot, int64_t* out  // [>= batch]
) {
    const int batch_index = blockIdx.x * kNumThreads + threadIdx.x;
    if (batch_index >= tables.batch) return;
    const int32_t seq_len = tables.seq_lens[batch_index];
    const int32_t first_block = tables.hot_tables[batch_index * tables.hot_table_stride];
    const bool is_padding = find_state(tables, first_block, seq_len) < 0;
    const int32_t slot = newest_slot(seq_len - 1, num_slots);
    const int64_t row_id = is_padding ? -1 : flat_hot_row_id(tables, hot, hot.rows_per_block, batch_index, slot);
    out[batch_index] = in_range(row_id, hot.num_rows) ? row_id : -1;
}

}  // namespace
}  // namespace hisparse

using namespace hisparse;

// Flat id of the hot row of each request's newest position: `SwapInOps.newest_row_ids`.
//
// hot: of any layer; hot->rows is not read and may be null. out: [>= batch].
extern "C" cudaError_t hisparse_newest_row_ids(
    const StepTables* tables, int32_t num_slots, const HotRows* hot, int64_t* out, cudaStream_t stream
) {
    if (tables->batch == 0) return cudaSuccess;
    const int num_blocks = (tables->batch + kNumThreads - 1) / kNumThreads;
    newest_row_ids_kernel<<<num_blocks, kNumThreads, 0, stream>>>(*tables, num_slots, *hot, out);
    return cudaGetLastError();
}
