#include "common.cuh"

namespace hisparse {
namespace {

__global__ void __launch_bounds__(kNumThreads) newest_row_ids_kernel(
    const StepTables tables, const HotRows hot, int64_t* out  // [>= batch]
) {
    const int batch_index = blockIdx.x * kNumThreads + threadIdx.x;
    if (batch_index >= tables.batch) return;
    const int32_t state_index = find_state(tables, batch_index);
    int64_t row_id = -1;
    if (state_index >= 0) {
        const int32_t slot = newest_slot(tables.seq_lens[batch_index] - 1, tables.num_hot_rows[state_index]);
        row_id = flat_hot_row_id(tables, hot, hot.rows_per_block, state_index, slot);
    }
    out[batch_index] = in_range(row_id, hot.num_rows) ? row_id : -1;
}

}  // namespace
}  // namespace hisparse

using namespace hisparse;

// Flat id of the hot row of each request's newest position: `SwapInOps.newest_row_ids`.
//
// hot: of any layer; hot->rows is not read and may be null. out: [>= batch].
extern "C" cudaError_t hisparse_newest_row_ids(
    const StepTables* tables, const HotRows* hot, int64_t* out, cudaStream_t stream
) {
    if (tables->batch == 0) return cudaSuccess;
    const int num_blocks = (tables->batch + kNumThreads - 1) / kNumThreads;
    newest_row_ids_kernel<<<num_blocks, kNumThreads, 0, stream>>>(*tables, *hot, out);
    return cudaGetLastError();
}
