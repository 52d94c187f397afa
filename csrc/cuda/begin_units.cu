#include "common.cuh"

namespace hisparse {

namespace {

constexpr int kUnitThreads = 128;

// One thread block per request.
__global__ void __launch_bounds__(kUnitThreads) begin_units_kernel(
    const DecodeMetadata decode, const UnitMetadata out
) {
    const int batch_index = blockIdx.x;
    const int32_t first_seq = find_seq(decode, batch_index, out.head_stride);
    const int32_t query_len = decode.query_lens == nullptr ? 1 : decode.query_lens[batch_index];
    const int32_t newest = first_seq < 0 ? 0 : decode.seq_lens[batch_index] - 1;
    const int32_t first = first_seq < 0 ? 0 : newest + 1 - query_len;
    const int32_t first_hot_block_id = decode.first_hot_block_ids[batch_index * decode.first_hot_block_stride];
    const int32_t first_part = first_hot_block_id * out.head_stride;
    for (int head = threadIdx.x; head < out.num_heads; head += kUnitThreads) {
        const int head_index = batch_index * out.num_heads + head;
        out.first_hot_block_ids[head_index] = first_seq < 0 ? -1 : first_part + head;
        out.num_units[head_index] = first_seq < 0 ? 0 : newest / out.tokens_per_unit + 1;
        out.num_new_units[head_index] = newest / out.tokens_per_unit + 1 - first / out.tokens_per_unit;
        for (int i = 0; i < out.max_query_len; ++i) {
            const bool exists = first_seq >= 0 && first + i <= newest;
            const int32_t tail = (first + i) % out.tokens_per_unit + 1 - out.tokens_per_unit;
            out.tails[head_index * out.max_query_len + i] = exists ? tail : 0;
        }
    }
    for (int i = threadIdx.x; i < out.max_query_len; i += kUnitThreads) {
        const bool exists = first_seq >= 0 && first + i <= newest;
        const int64_t place = static_cast<int64_t>(i) * out.max_batch + batch_index;
        // NOTE: there is one sequence more than KV heads of requests, because the last one is for no request.
        out.request_indices[place] = (exists ? first_seq : decode.num_seqs - 1) / out.num_heads;
        out.positions[place] = exists ? first + i : 0;
        out.num_tokens[place] = exists ? first + i + 1 : 0;
    }
}

}  // namespace
}  // namespace hisparse

using namespace hisparse;

cudaError_t hisparse::launch_begin_units(const DecodeMetadata& decode, const UnitMetadata& out, cudaStream_t stream) {
    if (decode.batch == 0) return cudaSuccess;
    begin_units_kernel<<<decode.batch, kUnitThreads, 0, stream>>>(decode, out);
    return cudaGetLastError();
}
