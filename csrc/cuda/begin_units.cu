#include "common.cuh"

namespace hisparse {

// Tables by KV head, as `UnitTables` in vllm_hisparse/ops/base.py describes them.
struct UnitTables {
    int64_t* request_indices;  // [batch]
    int64_t* positions;        // [batch]
    int32_t* tails;            // [batch * num_heads]
    int32_t* hot_tables;       // [batch * num_heads, num_hot_blocks]
    int32_t* num_units;        // [batch * num_heads]
    int32_t num_heads;
    int32_t head_stride;
    int32_t tokens_per_unit;
};

namespace {

constexpr int kUnitThreads = 128;

// One thread block per request.
__global__ void __launch_bounds__(kUnitThreads) begin_units_kernel(const StepTables tables, const UnitTables out) {
    const int batch_index = blockIdx.x;
    const int32_t* blocks = tables.hot_tables + batch_index * tables.hot_table_stride;
    const int32_t seq_len = tables.seq_lens[batch_index];
    const int32_t first_state = find_state(tables, blocks[0] * out.head_stride, seq_len);
    const int32_t newest = first_state < 0 ? 0 : seq_len - 1;
    const int num_entries = out.num_heads * tables.num_hot_blocks;
    for (int i = threadIdx.x; i < num_entries; i += kUnitThreads) {
        const int32_t block = blocks[i % tables.num_hot_blocks], head = i / tables.num_hot_blocks;
        out.hot_tables[static_cast<int64_t>(batch_index) * num_entries + i] =
            first_state < 0 ? -1 : block * out.head_stride + head;
    }
    for (int head = threadIdx.x; head < out.num_heads; head += kUnitThreads) {
        const int head_index = batch_index * out.num_heads + head;
        out.num_units[head_index] = first_state < 0 ? 0 : newest / out.tokens_per_unit + 1;
        out.tails[head_index] = first_state < 0 ? 0 : newest % out.tokens_per_unit + 1 - out.tokens_per_unit;
    }
    if (threadIdx.x != 0) return;
    // NOTE: there is one state more than KV heads of requests: the last is of no request.
    out.request_indices[batch_index] = (first_state < 0 ? tables.num_states - 1 : first_state) / out.num_heads;
    out.positions[batch_index] = newest;
}

}  // namespace
}  // namespace hisparse

using namespace hisparse;

// Tables by KV head of the decoding requests: `SwapInOps.begin_units`.
//
// tables: by request, without host_tables; num_device_blocks and num_states count parts and states of KV heads.
extern "C" cudaError_t hisparse_begin_units(const StepTables* tables, const UnitTables* out, cudaStream_t stream) {
    if (tables->batch == 0) return cudaSuccess;
    begin_units_kernel<<<tables->batch, kUnitThreads, 0, stream>>>(*tables, *out);
    return cudaGetLastError();
}
