// Arguments of the launchers: limits, structs, declarations. Only bindings.cc fills the structs, from the tensors of
// the classes of the same names in vllm_hisparse/ops/base.py, which document the fields.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

namespace hisparse {

// setup.py defines these macros from vllm_hisparse/ops/limits.py.
constexpr int kInterfaceVersion = HISPARSE_INTERFACE_VERSION;
constexpr int kMaxAge = HISPARSE_MAX_AGE;
constexpr int kUseBonus = HISPARSE_USE_BONUS;
constexpr int kMaxBonus = HISPARSE_MAX_BONUS;
static_assert(kUseBonus <= kMaxBonus && kMaxBonus < kMaxAge);
constexpr int kMaxTopK = HISPARSE_MAX_TOP_K;
constexpr int kMaxQueryLen = HISPARSE_MAX_QUERY_LEN;
constexpr int kMaxColumns = HISPARSE_MAX_COLUMNS;
constexpr int kMaxHotRows = HISPARSE_MAX_HOT_ROWS;
constexpr int kMaxLayers = HISPARSE_MAX_LAYERS;
constexpr int kNumStreams = HISPARSE_NUM_STREAMS;
constexpr int kVectorBytes = HISPARSE_VECTOR_BYTES;

constexpr int kWarpSize = 32;
constexpr int kBoundsVector = kVectorBytes / 2;  // 16-bit elements of a vector, which a lane has of a page's bounds
constexpr int kMaxBoundsSize = kWarpSize * kBoundsVector;  // largest head size of a page's bounds

// In structs and arguments of launchers, a pointer is not null unless its comment allows it. Tensors are contiguous and
// on the device unless their comment says otherwise.

// Hot rows of one layer: row `offset` of device block `block` has flat id `block * block_stride_rows + offset * pitch`;
// `equal_offset` is added in a block that is divided equally among layers.
struct HotRows {
    uint8_t* rows;  // [num_rows, row_bytes]
    int64_t num_rows;
    int64_t row_bytes;  // multiple of kVectorBytes
    int64_t block_stride_rows;
    int32_t rows_per_block;
    int32_t pitch;
    int32_t equal_rows_per_block;  // rows in a block that is divided equally; 0: no block is
    int32_t equal_offset;  // may be negative
    int32_t entries_per_block;  // in the residency: the larger number of rows
};

// Rows of one layer in the host pool.
struct HostRows {
    uint8_t* rows;  // [num_rows, row_bytes] in host memory that the device maps, pinned or managed
    int64_t num_rows;
    int64_t row_bytes;  // as on the device
};

// Row `offset` of device block `block` has entry `block * entries_per_block + offset` (`HotRows`).
struct Residency {
    int2* entries;  // [num_entries]: x is the position, -1 where the row is empty; y its expiry
    int32_t num_layers;  // number of layers that share this residency
};

// Residency of all layers: `ResidencyTable` in vllm_hisparse/kv_manager/rows/residency_table.py.
struct ResidencyTables {
    int2* entries;  // [num_tables, num_device_blocks, block_entries], as in `Residency`
    int32_t num_tables;
    int32_t num_device_blocks;
    int32_t block_entries;
};

// Requests whose hot blocks have moved, and the tables of all requests' hot blocks.
struct MovedRequests {
    const int64_t* seqs;  // [num_requests] sequence of each request's first KV head
    const int64_t* num_blocks;  // [num_requests] hot blocks of each, up to most_blocks
    int64_t* latest;  // [num_requests] scratch memory; -1 before the launch
    const int32_t* hot_block_tables;  // [num_seqs, num_hot_blocks], sequences hot_block_table_stride elements apart
    int64_t hot_block_table_stride;
    int32_t num_seqs;
    int32_t num_hot_blocks;
    int32_t num_requests;
    int32_t most_blocks;
    int32_t head_stride;  // parts from one device block to the next (`KVHeads`)
};

struct DecodeMetadata {
    const int32_t* seq_indices;  // [num_device_blocks]; -1 for a block that is not the first of a request
    const int32_t* first_hot_block_ids;  // [batch], first_hot_block_stride elements apart
    const int32_t* seq_lens;  // [batch]
    const int32_t* hot_block_tables;  // [num_seqs, num_hot_blocks], requests hot_block_table_stride elements apart
    const int32_t* num_hot_rows;  // [num_seqs]; null if the launch does not use hot rows
    const int32_t* host_block_tables;  // [num_seqs, num_host_blocks], requests host_block_table_stride elements apart
    const int32_t* query_lens;  // [batch]; null: one new token each
    const int32_t* has_equal_rows;  // [num_seqs] 1: the sequence's hot blocks are divided equally; null: no one's are
    int64_t first_hot_block_stride;
    int64_t hot_block_table_stride;
    int64_t host_block_table_stride;
    int32_t num_device_blocks;
    int32_t num_hot_blocks;
    int32_t num_seqs;
    int32_t num_host_blocks;
    int32_t batch;
    int32_t block_size;
    int32_t max_query_len;
};

struct Resolved {
    int32_t* hot_row_ids;  // [>= batch, num_columns]
    int32_t* num_valid;  // [>= batch, max_query_len]
    int64_t* miss_host_row_ids;  // [>= batch, num_columns]
    int32_t* miss_hot_row_ids;  // [>= batch, num_columns]
    int32_t* num_misses;  // [>= batch]
    int32_t num_columns;  // max_query_len selections side by side
};

// Metadata by KV head, as `UnitMetadata` in vllm_hisparse/ops/base.py describes them.
struct UnitMetadata {
    int64_t* request_indices;  // [max_query_len, max_batch]
    int64_t* positions;  // [max_query_len, max_batch]
    int64_t* num_tokens;  // [max_query_len, max_batch]
    int32_t* tails;  // [max_batch * num_heads, max_query_len]
    int32_t* first_hot_block_ids;  // [max_batch * num_heads]
    int32_t* num_units;  // [max_batch * num_heads]
    int32_t* num_new_units;  // [max_batch * num_heads]
    int32_t max_batch;
    int32_t max_query_len;
    int32_t num_heads;
    int32_t head_stride;
    int32_t tokens_per_unit;
};

// New keys and values of the decoding requests, and their places.
struct NewTokens {
    const uint8_t* keys;  // [batch, max_query_len, num_heads, head_bytes], tokens key_stride bytes apart
    const uint8_t* values;  // [batch, max_query_len, num_heads, head_bytes], tokens value_stride bytes apart
    int64_t key_stride;
    int64_t value_stride;
    const int64_t* num_tokens;  // [max_query_len, max_batch] tokens of the request up to each new one; 0: empty
    int32_t max_batch;
    int32_t max_query_len;
    int32_t num_heads;
    int32_t head_bytes;  // multiple of kVectorBytes
    int32_t tokens_per_unit;
};

// Bounds of pages of one layer; elements are bfloat16 or float16.
struct PageBounds {
    void* blocks;  // [num_blocks, pages_per_block, 2, num_heads, head_size]: minima, then maxima of a page
    const int32_t* table;  // [num_requests, max_blocks]: each request's blocks
    int64_t block_stride;  // elements from one block to the next, multiple of kBoundsVector
    int64_t table_stride;  // entries from one request to the next
    int32_t pages_per_block;
    int32_t max_pages;  // pages of the longest request
    int32_t num_heads;
    int32_t head_size;  // multiple of kBoundsVector, at most kMaxBoundsSize
    int32_t page_size;
};

// Bounds of its page after each of the latest positions, at that position modulo `count`.
struct LatestBounds {
    void* bounds;  // [num_requests, count, 2, num_heads, head_size]; null if the count is 0
    int32_t count;  // 0: a new key extends the bounds of all keys of its page
};

// Indexer keys in 4 bits of one layer, as vllm_hisparse/ops/indexer_keys.py describes them.
struct NarrowKeys {
    uint8_t*
        blocks;  // [num_blocks, bytes of block_size keys], blocks block_stride bytes apart, a multiple of kVectorBytes
    int64_t block_stride;
    int32_t block_size;
};

// What an indexer asks of the keys of a batch.
struct LogitsBatch {
    const uint8_t* query;  // [num_requests, num_queries, num_heads, 128] fp8 (e4m3)
    const float* weights;  // [num_requests * num_queries, num_heads], rows weight_stride elements apart
    const int32_t* seq_lens;  // [num_requests], of the newest query, seq_len_stride entries apart
    const int32_t* block_table;  // [num_requests, ...], requests table_stride entries apart
    int64_t seq_len_stride;
    int64_t weight_stride;
    int64_t table_stride;
    int32_t num_requests;
    int32_t num_queries;
    int32_t num_heads;
};

// Rows of each layer of a launch. The launch has their sizes in other arguments. Pointers beyond its layers may be
// null.
struct LayerRows {
    const uint8_t* hot[kMaxLayers];  // [hot.num_rows, hot.row_bytes]
    uint8_t* host[kMaxLayers];  // [num_host_rows, hot.row_bytes] in host memory that the device maps
    int32_t equal_offsets[kMaxLayers];  // `equal_offset` of each layer
    // The smallest number of rows of a layer minus its `equal_offset`: below it, every layer has memory for a flat id
    // plus its `equal_offset`.
    int64_t num_equal_rows;
};

// Every launcher enqueues on the stream and returns CUDA's error code, cudaErrorInvalidValue for sizes beyond the
// limits.

// Find hits, choose victims and update the residency: `SwapInOps.resolve`.
//
// selected_positions: [batch, out.num_columns], requests selected_stride elements apart. hot: hot.rows is not read and
// may be null. counts: [num_seqs, 2]. shares_device: whether kernels of other streams run at the same time and get most
// multiprocessors.
cudaError_t launch_resolve(
    const Residency& residency,
    const DecodeMetadata& decode,
    const int32_t* selected_positions,
    int64_t selected_stride,
    const HotRows& hot,
    int64_t* counts,
    const Resolved& out,
    bool shares_device,
    cudaStream_t stream
);

// Copy missed rows to their hot slots: `SwapInOps.gather`.
//
// after_resolve: whether the last launch on this stream was `launch_resolve`; the copy then starts before that has
// ended.
cudaError_t launch_gather(
    const HostRows& host,
    const HotRows& hot,
    const Resolved& resolved,
    int32_t batch,
    bool shares_device,
    bool after_resolve,
    cudaStream_t stream
);

// Resolve, then gather, whose launch overlaps with the resolution: `SwapInOps.swap_in`. Arguments are those of these
// two.
cudaError_t launch_swap_in(
    const Residency& residency,
    const DecodeMetadata& decode,
    const int32_t* selected_positions,
    int64_t selected_stride,
    const HostRows& host,
    const HotRows& hot,
    int64_t* counts,
    const Resolved& out,
    bool shares_device,
    cudaStream_t stream
);

// Move the valid ids of each selection to its front: `SwapInOps.compact`.
//
// row_ids: [num_selections, num_columns]. num_valid: [num_selections].
cudaError_t launch_compact_rows(
    int32_t* row_ids, int32_t* num_valid, int32_t num_selections, int32_t num_columns, cudaStream_t stream
);

// Find the hot row of each new position: `SwapInOps.newest_row_ids`.
//
// hot: hot rows of any layer; hot.rows is not read and may be null. equal_offsets: [num_layers]; null: that of `hot`.
// out: [num_layers, >= batch, max_query_len], layers out_stride elements apart.
cudaError_t launch_newest_row_ids(
    const DecodeMetadata& decode,
    const HotRows& hot,
    const int32_t* equal_offsets,
    int32_t num_layers,
    int64_t* out,
    int64_t out_stride,
    cudaStream_t stream
);

// Copy each request's new rows of up to kMaxLayers layers to the host: `SwapInOps.write_back`.
//
// hot: sizes of every layer; hot.rows is not read and may be null.
cudaError_t launch_write_back(
    const LayerRows& layers,
    int32_t num_layers,
    const HotRows& hot,
    int64_t num_host_rows,
    const DecodeMetadata& decode,
    cudaStream_t stream
);

// Copy the first rows of a prefilling request from the host: `SwapInOps.stage_rows`.
//
// host_block_table: [num_host_blocks]. staging: [num_rows, row_bytes]; rows of a block that is -1 keep what they hold.
cudaError_t launch_stage_rows(
    const HostRows& host,
    const int32_t* host_block_table,
    int32_t num_host_blocks,
    int32_t block_size,
    uint8_t* staging,
    int32_t num_rows,
    int64_t row_bytes,
    cudaStream_t stream
);

// Copy new rows of a request to the host: `SwapInOps.save_rows`.
//
// rows: [num_rows, row_bytes] rows of the positions from `first` on. host_block_table: [num_host_blocks].
cudaError_t launch_save_rows(
    const uint8_t* rows,
    int32_t first,
    int32_t num_rows,
    int64_t row_bytes,
    const HostRows& host,
    const int32_t* host_block_table,
    int32_t num_host_blocks,
    int32_t block_size,
    cudaStream_t stream
);

// Make the metadata by KV head of the decoding requests: `SwapInOps.begin_units`.
//
// decode: metadata by request, without blocks; num_device_blocks and num_seqs count parts and sequences of KV heads.
cudaError_t launch_begin_units(const DecodeMetadata& decode, const UnitMetadata& out, cudaStream_t stream);

// Write new tokens into their units on the device and on the host: `SwapInOps.write_tokens`.
//
// decode: metadata by KV head, with decode.batch = batch * num_heads. first_units: [num_seqs].
cudaError_t launch_write_tokens(
    const NewTokens& tokens,
    const DecodeMetadata& decode,
    const HotRows& hot,
    const HostRows& host,
    int32_t* first_units,
    cudaStream_t stream
);

// Make the entries of the latest `num_latest` positions of some requests empty: `SwapInOps.empty_latest`.
cudaError_t launch_empty_latest(
    const ResidencyTables& residency, const MovedRequests& moved, int32_t num_latest, cudaStream_t stream
);

// Select the best units of each KV head, the newest unit last: `ops/select_units.py`.
//
// scores: [batch, num_heads, max_units]. num_tokens: [batch]. units: [batch, num_heads, num_selected].
cudaError_t launch_select_units(
    const float* scores,
    const int64_t* num_tokens,
    int32_t batch,
    int32_t num_heads,
    int32_t max_units,
    int32_t tokens_per_unit,
    int32_t num_selected,
    int32_t* units,
    cudaStream_t stream
);

// Select the best positions of each query by score: `select_positions`. GPUs of compute capability 9.0.
//
// scores: queries scores_stride elements apart, a multiple of 4; aligned to 16 bytes. lengths: [num_queries]. positions:
// [num_queries, top_k], queries positions_stride elements apart.
cudaError_t launch_select_positions(
    const float* scores,
    int64_t scores_stride,
    const int32_t* lengths,
    int32_t num_queries,
    int32_t top_k,
    int32_t* positions,
    int64_t positions_stride,
    cudaStream_t stream
);

// Extend the bounds of a page by one new key per request: `page_bounds.update`.
//
// request_indices, positions: [batch]. keys: [batch, num_heads, head_size] of the bounds' type, requests key_stride
// elements apart. is_bfloat16: false: the type is float16.
cudaError_t launch_update_page_bounds(
    const PageBounds& bounds,
    const LatestBounds& latest,
    const int64_t* request_indices,
    const int64_t* positions,
    const void* keys,
    int64_t key_stride,
    int32_t batch,
    bool is_bfloat16,
    cudaStream_t stream
);

// Compute upper bounds of the scores of pages: `page_bounds.scores`.
//
// request_indices, num_tokens: [batch]. query: [batch, num_heads * group, head_size] of the bounds' type, requests
// query_stride elements apart. scores: [batch, num_heads, max_pages], written only for pages that a request has.
cudaError_t launch_page_scores(
    const PageBounds& bounds,
    const int64_t* request_indices,
    const int64_t* num_tokens,
    const void* query,
    int64_t query_stride,
    int32_t group,
    int32_t batch,
    bool is_bfloat16,
    float* scores,
    cudaStream_t stream
);

// Quantise keys and write them to their slots: `indexer_keys.insert`.
//
// keys: [num_keys, 128] bfloat16, key_stride elements apart. slots: [num_keys], -1 is skipped.
cudaError_t launch_insert_indexer_keys(
    const NarrowKeys& cache,
    const void* keys,
    int64_t key_stride,
    const int64_t* slots,
    int64_t num_keys,
    cudaStream_t stream
);

// Write the keys of whole requests side by side, in 8 bits: `indexer_keys.gather`.
//
// block_table: [num_requests, ...], requests table_stride entries apart. starts: [num_requests + 1]. values:
// [max_keys, 128] fp8. scales: [max_keys] float32.
cudaError_t launch_gather_indexer_keys(
    const NarrowKeys& cache,
    const int32_t* block_table,
    int64_t table_stride,
    const int32_t* starts,
    int32_t num_requests,
    uint8_t* values,
    uint8_t* scales,
    int64_t max_keys,
    cudaStream_t stream
);

// Convert blocks of 64 keys: `indexer_keys.narrow_blocks` and, if not to_narrow, `widen_blocks`.
//
// wide: [num_blocks, 64 * 132]. narrow: [num_blocks, 64 * 68].
cudaError_t launch_convert_indexer_keys(
    uint8_t* wide, uint8_t* narrow, int64_t num_blocks, bool to_narrow, cudaStream_t stream
);

// Scores of all keys of each request: `indexer_keys.paged_logits`. GPUs of compute capability 9.0, 32 or 64 heads, blocks
// of 64 keys.
//
// logits: [num_requests * num_queries, ...], rows logits_stride elements apart, with room for whole blocks.
cudaError_t launch_indexer_logits(
    const NarrowKeys& cache, const LogitsBatch& batch, float* logits, int64_t logits_stride, cudaStream_t stream
);

// Allocate managed memory that stays in host memory. Error: cudaErrorNotSupported, if the CPU and the device cannot use
// managed memory at the same time.
cudaError_t allocate_managed(size_t num_bytes, int device, void** memory);

// Map managed memory in the device's page tables, so that the device reads and writes it where it is.
cudaError_t map_managed(void* memory, size_t num_bytes, int device);

// Free managed memory, after all work of the device has ended: the call waits for it.
cudaError_t free_managed(void* memory);

}  // namespace hisparse
