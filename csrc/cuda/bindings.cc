// The library's interface for Python, over TVM FFI. It makes the kernels' structs from tensors, and hands them out as
// objects, so that the tensors are checked only once.
#include <algorithm>
#include <type_traits>

#include <tvm/ffi/tvm_ffi.h>

#include "arguments.h"

namespace hisparse {
namespace {

namespace ffi = tvm::ffi;
using ffi::Optional;
using ffi::TensorView;

// A struct of arguments as a Python object.
template <typename T>
struct TypeKey;

template <typename T>
class ArgumentsObj : public ffi::Object {
public:
    T value;

    explicit ArgumentsObj(const T& value) : value(value) {}
    TVM_FFI_DECLARE_OBJECT_INFO_FINAL(TypeKey<T>::value, ArgumentsObj<T>, ffi::Object);
};

template <typename T>
class Arguments : public ffi::ObjectRef {
public:
    explicit Arguments(const T& value) : ffi::ObjectRef(ffi::make_object<ArgumentsObj<T>>(value)) {}
    const T& operator*() const { return get()->value; }
    TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(Arguments, ffi::ObjectRef, ArgumentsObj<T>);
};

// Layers of one launch of `write_back`: their rows, their common sizes, and the smallest of their numbers of host rows.
struct LayerGroup {
    LayerRows rows;
    int32_t num_layers;
    HotRows sizes;
    int64_t num_host_rows;
};

template <>
struct TypeKey<HotRows> {
    static constexpr const char* value = "vllm_hisparse.HotRows";
};
template <>
struct TypeKey<Residency> {
    static constexpr const char* value = "vllm_hisparse.Residency";
};
template <>
struct TypeKey<DecodeMetadata> {
    static constexpr const char* value = "vllm_hisparse.DecodeMetadata";
};
template <>
struct TypeKey<Resolved> {
    static constexpr const char* value = "vllm_hisparse.Resolved";
};
template <>
struct TypeKey<UnitMetadata> {
    static constexpr const char* value = "vllm_hisparse.UnitMetadata";
};
template <>
struct TypeKey<LayerGroup> {
    static constexpr const char* value = "vllm_hisparse.LayerGroup";
};

void check(bool holds, const char* what) {
    if (!holds) TVM_FFI_THROW(ValueError) << what;
}

void check(cudaError_t error) {
    if (error != cudaSuccess) {
        TVM_FFI_THROW(RuntimeError) << cudaGetErrorString(error) << " (CUDA error " << static_cast<int>(error) << ")";
    }
}

cudaStream_t stream_of(int64_t stream) {
    return reinterpret_cast<cudaStream_t>(stream);
}

template <typename T>
bool has_type(const TensorView& tensor) {
    const DLDataType type = tensor.dtype();
    const auto code = std::is_floating_point_v<T> ? kDLFloat : kDLInt;
    return type.code == code && type.bits == 8 * sizeof(T) && type.lanes == 1;
}

// Return a pointer to the elements of a tensor, after a check of their type.
template <typename T>
T* elements(const TensorView& tensor, const char* name) {
    if (!has_type<T>(tensor)) TVM_FFI_THROW(TypeError) << name << " is of another dtype: " << tensor.dtype();
    return static_cast<T*>(tensor.data_ptr());
}

// The same for a tensor that must be contiguous.
template <typename T>
T* contiguous(const TensorView& tensor, const char* name) {
    if (!tensor.IsContiguous()) TVM_FFI_THROW(ValueError) << name << " is not contiguous";
    return elements<T>(tensor, name);
}

// The same for a matrix whose rows must be contiguous.
template <typename T>
T* matrix(const TensorView& tensor, const char* name) {
    const bool has_rows = tensor.ndim() == 2 && (tensor.stride(1) == 1 || tensor.size(1) == 1);
    if (!has_rows) TVM_FFI_THROW(ValueError) << name << " is no matrix with contiguous rows";
    return elements<T>(tensor, name);
}

int64_t element_bytes(const TensorView& tensor) {
    return tensor.dtype().bits * tensor.dtype().lanes / 8;
}

int64_t row_bytes_of(const TensorView& rows) {
    check(rows.IsContiguous() && rows.ndim() == 2, "rows must be a contiguous matrix");
    const int64_t num_bytes = rows.size(1) * element_bytes(rows);
    check(num_bytes % kVectorBytes == 0, "rows must be a multiple of 16 bytes");
    return num_bytes;
}

HostRows host_rows_of(const TensorView& rows) {
    return {static_cast<uint8_t*>(rows.data_ptr()), rows.size(0), row_bytes_of(rows)};
}

HostRows host_rows_of(const TensorView& rows, const HotRows& hot) {
    const HostRows host = host_rows_of(rows);
    check(host.row_bytes == hot.row_bytes, "host and device rows are of different sizes");
    return host;
}

const int32_t* host_block_table_of(const TensorView& table) {
    check(table.ndim() == 1, "a host table has one dimension");
    return contiguous<int32_t>(table, "host_block_table");
}

// The objects

Arguments<HotRows> hot_rows(
    TensorView rows,
    int32_t rows_per_block,
    int64_t block_stride_rows,
    int32_t pitch,
    int32_t equal_rows_per_block,
    int32_t equal_offset
) {
    const auto first = static_cast<uint8_t*>(rows.data_ptr());
    return Arguments<HotRows>({
        first,
        rows.size(0),
        row_bytes_of(rows),
        block_stride_rows,
        rows_per_block,
        pitch,
        equal_rows_per_block,
        equal_offset,
        std::max(rows_per_block, equal_rows_per_block),
    });
}

Arguments<Residency> residency(TensorView entries, int32_t num_layers) {
    check(entries.ndim() == 2 && entries.size(1) == 2, "a residency has two columns");
    return Arguments<Residency>({reinterpret_cast<int2*>(contiguous<int32_t>(entries, "residency")), num_layers});
}

DecodeMetadata requests_of(
    const TensorView& seq_indices,
    const TensorView& first_hot_block_ids,
    const TensorView& seq_lens,
    const Optional<TensorView>& query_lens
) {
    const bool same_batch = first_hot_block_ids.ndim() == 1 && first_hot_block_ids.size(0) == seq_lens.size(0);
    check(same_batch, "first_hot_block_ids and seq_lens are of other batches");
    DecodeMetadata decode{};
    decode.seq_indices = contiguous<int32_t>(seq_indices, "seq_indices");
    decode.first_hot_block_ids = elements<int32_t>(first_hot_block_ids, "first_hot_block_ids");
    decode.seq_lens = contiguous<int32_t>(seq_lens, "seq_lens");
    if (query_lens.has_value()) decode.query_lens = contiguous<int32_t>(query_lens.value(), "query_lens");
    decode.first_hot_block_stride = first_hot_block_ids.stride(0);
    decode.num_device_blocks = static_cast<int32_t>(seq_indices.size(0));
    decode.batch = static_cast<int32_t>(seq_lens.size(0));
    return decode;
}

Arguments<DecodeMetadata> decode_metadata(
    TensorView seq_indices,
    TensorView first_hot_block_ids,
    TensorView seq_lens,
    TensorView hot_block_tables,
    TensorView num_hot_rows,
    TensorView host_block_tables,
    Optional<TensorView> has_equal_rows,
    int32_t block_size,
    Optional<TensorView> query_lens,
    int32_t max_query_len
) {
    DecodeMetadata decode = requests_of(seq_indices, first_hot_block_ids, seq_lens, query_lens);
    decode.hot_block_tables = matrix<int32_t>(hot_block_tables, "hot_block_tables");
    decode.num_hot_rows = contiguous<int32_t>(num_hot_rows, "num_hot_rows");
    decode.host_block_tables = matrix<int32_t>(host_block_tables, "host_block_tables");
    if (has_equal_rows.has_value()) {
        decode.has_equal_rows = contiguous<int32_t>(has_equal_rows.value(), "has_equal_rows");
    }
    decode.hot_block_table_stride = hot_block_tables.stride(0);
    decode.host_block_table_stride = host_block_tables.stride(0);
    decode.num_hot_blocks = static_cast<int32_t>(hot_block_tables.size(1));
    decode.num_seqs = static_cast<int32_t>(host_block_tables.size(0));
    decode.num_host_blocks = static_cast<int32_t>(host_block_tables.size(1));
    decode.block_size = block_size;
    decode.max_query_len = max_query_len;
    return Arguments<DecodeMetadata>(decode);
}

Arguments<Resolved> resolved(
    TensorView hot_row_ids,
    TensorView num_valid,
    TensorView miss_host_row_ids,
    TensorView miss_hot_row_ids,
    TensorView num_misses
) {
    check(hot_row_ids.ndim() == 2, "hot_row_ids is no matrix");
    return Arguments<Resolved>({
        contiguous<int32_t>(hot_row_ids, "hot_row_ids"),
        contiguous<int32_t>(num_valid, "num_valid"),
        contiguous<int64_t>(miss_host_row_ids, "miss_host_row_ids"),
        contiguous<int32_t>(miss_hot_row_ids, "miss_hot_row_ids"),
        contiguous<int32_t>(num_misses, "num_misses"),
        static_cast<int32_t>(hot_row_ids.size(1)),
    });
}

Arguments<UnitMetadata> unit_metadata(
    TensorView request_indices,
    TensorView positions,
    TensorView num_tokens,
    TensorView tails,
    TensorView first_hot_block_ids,
    TensorView num_units,
    TensorView num_new_units,
    int32_t num_heads,
    int32_t head_stride,
    int32_t tokens_per_unit
) {
    return Arguments<UnitMetadata>({
        contiguous<int64_t>(request_indices, "request_indices"),
        contiguous<int64_t>(positions, "positions"),
        contiguous<int64_t>(num_tokens, "num_tokens"),
        contiguous<int32_t>(tails, "tails"),
        contiguous<int32_t>(first_hot_block_ids, "first_hot_block_ids"),
        contiguous<int32_t>(num_units, "num_units"),
        contiguous<int32_t>(num_new_units, "num_new_units"),
        static_cast<int32_t>(positions.size(1)),
        static_cast<int32_t>(positions.size(0)),
        num_heads,
        head_stride,
        tokens_per_unit,
    });
}

Arguments<LayerGroup> layer_group(ffi::Array<Arguments<HotRows>> hot, ffi::Array<ffi::Tensor> host) {
    check(
        hot.size() == host.size() && !hot.empty() && hot.size() <= kMaxLayers, "as many hot as host layers, at most 128"
    );
    LayerGroup group{};
    group.num_layers = static_cast<int32_t>(hot.size());
    group.sizes = *hot[0];
    group.num_host_rows = host[0].size(0);
    group.rows.num_equal_rows = group.sizes.num_rows - group.sizes.equal_offset;
    for (size_t index = 0; index < hot.size(); ++index) {
        const HotRows& rows = *hot[index];
        const HostRows home = host_rows_of(TensorView(host[index]), rows);
        const bool is_alike = rows.row_bytes == group.sizes.row_bytes
                              && rows.block_stride_rows == group.sizes.block_stride_rows
                              && rows.rows_per_block == group.sizes.rows_per_block && rows.pitch == group.sizes.pitch
                              && rows.equal_rows_per_block == group.sizes.equal_rows_per_block;
        check(is_alike, "layers are of unequal sizes");
        group.rows.hot[index] = rows.rows;
        group.rows.host[index] = home.rows;
        group.rows.equal_offsets[index] = rows.equal_offset;
        group.rows.num_equal_rows = std::min(group.rows.num_equal_rows, rows.num_rows - rows.equal_offset);
        group.sizes.num_rows = std::min(group.sizes.num_rows, rows.num_rows);
        group.num_host_rows = std::min(group.num_host_rows, home.num_rows);
    }
    return Arguments<LayerGroup>(group);
}

// The launches

// Selections of a launch: [batch, columns].
const int32_t* selected_of(const TensorView& selected, const DecodeMetadata& decode, const Resolved& out) {
    check(selected.size(0) == decode.batch && selected.size(1) == out.num_columns, "selections of other sizes");
    return matrix<int32_t>(selected, "selected");
}

void resolve(
    Arguments<Residency> residency,
    Arguments<DecodeMetadata> decode,
    TensorView selected_positions,
    Arguments<HotRows> hot,
    TensorView counts,
    Arguments<Resolved> out,
    int64_t stream
) {
    const int32_t* columns = selected_of(selected_positions, *decode, *out);
    int64_t* counters = contiguous<int64_t>(counts, "counts");
    check(launch_resolve(
        *residency, *decode, columns, selected_positions.stride(0), *hot, counters, *out, false, stream_of(stream)
    ));
}

void gather(
    TensorView host,
    Arguments<HotRows> hot,
    Arguments<Resolved> resolved,
    int32_t batch,
    bool shares_device,
    int64_t stream
) {
    check(launch_gather(host_rows_of(host, *hot), *hot, *resolved, batch, shares_device, false, stream_of(stream)));
}

void swap_in(
    Arguments<Residency> residency,
    Arguments<DecodeMetadata> decode,
    TensorView selected_positions,
    TensorView host,
    Arguments<HotRows> hot,
    TensorView counts,
    Arguments<Resolved> out,
    bool shares_device,
    int64_t stream
) {
    const int32_t* columns = selected_of(selected_positions, *decode, *out);
    int64_t* counters = contiguous<int64_t>(counts, "counts");
    const HostRows rows = host_rows_of(host, *hot);
    check(launch_swap_in(
        *residency, *decode, columns, selected_positions.stride(0), rows, *hot, counters, *out, shares_device,
        stream_of(stream)
    ));
}

void compact_rows(TensorView row_ids, TensorView num_valid, int64_t stream) {
    check(row_ids.ndim() == 2 && num_valid.size(0) == row_ids.size(0), "ids and counts are of other selections");
    int32_t* ids = contiguous<int32_t>(row_ids, "row_ids");
    int32_t* counts = contiguous<int32_t>(num_valid, "num_valid");
    const auto num_selections = static_cast<int32_t>(row_ids.size(0));
    check(launch_compact_rows(ids, counts, num_selections, static_cast<int32_t>(row_ids.size(1)), stream_of(stream)));
}

void newest_row_ids(
    Arguments<DecodeMetadata> decode,
    Arguments<HotRows> hot,
    TensorView out,
    Optional<TensorView> equal_offsets,
    int64_t stream
) {
    const DecodeMetadata& step = *decode;
    const bool by_layer = equal_offsets.has_value();
    check(out.ndim() == 1 + by_layer, "out has another number of dimensions");
    check(out.size(by_layer) >= static_cast<int64_t>(step.batch) * step.max_query_len, "out is too short");
    const int32_t* offsets = by_layer ? contiguous<int32_t>(equal_offsets.value(), "equal_offsets") : nullptr;
    check(!by_layer || equal_offsets.value().size(0) == out.size(0), "an offset for each layer of out");
    check(launch_newest_row_ids(
        step, *hot, offsets, by_layer ? static_cast<int32_t>(out.size(0)) : 1, contiguous<int64_t>(out, "out"),
        out.size(by_layer), stream_of(stream)
    ));
}

void write_back(Arguments<LayerGroup> layers, Arguments<DecodeMetadata> decode, int64_t stream) {
    const LayerGroup& group = *layers;
    check(
        launch_write_back(group.rows, group.num_layers, group.sizes, group.num_host_rows, *decode, stream_of(stream))
    );
}

void stage_rows(TensorView host, TensorView host_block_table, int32_t block_size, TensorView staging, int64_t stream) {
    const HostRows rows = host_rows_of(host);
    check(row_bytes_of(staging) == rows.row_bytes, "host and device rows are of different sizes");
    check(launch_stage_rows(
        rows, host_block_table_of(host_block_table), static_cast<int32_t>(host_block_table.size(0)), block_size,
        static_cast<uint8_t*>(staging.data_ptr()), static_cast<int32_t>(staging.size(0)), rows.row_bytes,
        stream_of(stream)
    ));
}

void save_rows(
    TensorView rows, int32_t first, TensorView host, TensorView host_block_table, int32_t block_size, int64_t stream
) {
    const HostRows homes = host_rows_of(host);
    check(row_bytes_of(rows) == homes.row_bytes, "host and device rows are of different sizes");
    check(launch_save_rows(
        static_cast<const uint8_t*>(rows.data_ptr()), first, static_cast<int32_t>(rows.size(0)), homes.row_bytes, homes,
        host_block_table_of(host_block_table), static_cast<int32_t>(host_block_table.size(0)), block_size,
        stream_of(stream)
    ));
}

// num_seqs: sequences by KV head, including the one for no request.
void begin_units(
    TensorView first_hot_block_ids,
    TensorView seq_lens,
    Optional<TensorView> query_lens,
    TensorView seq_indices,
    int32_t num_seqs,
    Arguments<UnitMetadata> out,
    int64_t stream
) {
    DecodeMetadata decode = requests_of(seq_indices, first_hot_block_ids, seq_lens, query_lens);
    decode.num_seqs = num_seqs;
    check(launch_begin_units(decode, *out, stream_of(stream)));
}

// Return the distance in bytes from one token's heads to the next token's; the heads of a token lie side by side.
int64_t token_stride(const TensorView& tokens, int64_t head_bytes) {
    check(tokens.ndim() == 3 && tokens.stride(2) == 1, "tokens must be [tokens, heads, elements]");
    check(tokens.size(1) == 1 || tokens.stride(1) == tokens.size(2), "heads must lie side by side");
    const int64_t stride = tokens.stride(0) * element_bytes(tokens);
    check(head_bytes % kVectorBytes == 0 && stride % kVectorBytes == 0, "heads must be a multiple of 16 bytes");
    return stride;
}

void write_tokens(
    TensorView key,
    TensorView value,
    Arguments<UnitMetadata> units,
    Arguments<DecodeMetadata> decode,
    Arguments<HotRows> hot,
    TensorView host,
    TensorView first_units,
    int64_t stream
) {
    const int64_t head_bytes = key.size(2) * element_bytes(key);
    const UnitMetadata& by_unit = *units;
    const NewTokens tokens{
        static_cast<const uint8_t*>(key.data_ptr()),
        static_cast<const uint8_t*>(value.data_ptr()),
        token_stride(key, head_bytes),
        token_stride(value, head_bytes),
        by_unit.num_tokens,
        by_unit.max_batch,
        by_unit.max_query_len,
        by_unit.num_heads,
        static_cast<int32_t>(head_bytes),
        by_unit.tokens_per_unit,
    };
    check(launch_write_tokens(
        tokens, *decode, *hot, host_rows_of(host, *hot), contiguous<int32_t>(first_units, "first_units"),
        stream_of(stream)
    ));
}

// most_blocks: the largest of num_blocks.
void empty_latest(
    TensorView entries,
    TensorView hot_block_tables,
    int32_t head_stride,
    TensorView seqs,
    TensorView num_blocks,
    TensorView latest,
    int32_t most_blocks,
    int32_t num_latest,
    int64_t stream
) {
    check(entries.ndim() == 4 && entries.size(3) == 2, "the residency of all layers is [tables, blocks, rows, 2]");
    check(seqs.size(0) == num_blocks.size(0) && seqs.size(0) == latest.size(0), "vectors of other requests");
    check(head_stride > 0 && num_latest > 0, "head_stride and num_latest are at least 1");
    const ResidencyTables residency{
        reinterpret_cast<int2*>(contiguous<int32_t>(entries, "entries")),
        static_cast<int32_t>(entries.size(0)),
        static_cast<int32_t>(entries.size(1)),
        static_cast<int32_t>(entries.size(2)),
    };
    const MovedRequests moved{
        contiguous<int64_t>(seqs, "seqs"),
        contiguous<int64_t>(num_blocks, "num_blocks"),
        contiguous<int64_t>(latest, "latest"),
        matrix<int32_t>(hot_block_tables, "hot_block_tables"),
        hot_block_tables.stride(0),
        static_cast<int32_t>(hot_block_tables.size(0)),
        static_cast<int32_t>(hot_block_tables.size(1)),
        static_cast<int32_t>(seqs.size(0)),
        most_blocks,
        head_stride,
    };
    check(launch_empty_latest(residency, moved, num_latest, stream_of(stream)));
}

void select_units(TensorView scores, TensorView num_tokens, int32_t tokens_per_unit, TensorView units, int64_t stream) {
    check(scores.ndim() == 3 && units.ndim() == 3, "scores and units have three dimensions");
    check(launch_select_units(
        contiguous<float>(scores, "scores"), contiguous<int64_t>(num_tokens, "num_tokens"),
        static_cast<int32_t>(scores.size(0)), static_cast<int32_t>(scores.size(1)),
        static_cast<int32_t>(scores.size(2)), tokens_per_unit, static_cast<int32_t>(units.size(2)),
        contiguous<int32_t>(units, "units"), stream_of(stream)
    ));
}

void select_positions(TensorView scores, TensorView lengths, TensorView positions, int64_t stream) {
    const auto* const first = matrix<float>(scores, "scores");
    const bool is_aligned = reinterpret_cast<uintptr_t>(first) % kVectorBytes == 0 && scores.stride(0) % 4 == 0;
    check(is_aligned, "rows of scores are not aligned to 16 bytes");
    check(lengths.size(0) == scores.size(0) && positions.size(0) == scores.size(0), "numbers of queries differ");
    check(launch_select_positions(
        first, scores.stride(0), contiguous<int32_t>(lengths, "lengths"), static_cast<int32_t>(scores.size(0)),
        static_cast<int32_t>(positions.size(1)), matrix<int32_t>(positions, "positions"), positions.stride(0),
        stream_of(stream)
    ));
}

bool is_bfloat16(const TensorView& tensor) {
    const DLDataType type = tensor.dtype();
    const bool is_known = (type.code == kDLBfloat || type.code == kDLFloat) && type.bits == 16;
    if (!is_known) TVM_FFI_THROW(TypeError) << "bounds and vectors are bfloat16 or float16, not " << type;
    return type.code == kDLBfloat;
}

// Bounds of pages, and vectors of their type: [batch, heads, head_size].
PageBounds page_bounds_of(
    const TensorView& table, const TensorView& blocks, const TensorView& vectors, int32_t page_size, int32_t max_pages
) {
    const auto size = static_cast<int32_t>(blocks.size(4));
    check(blocks.ndim() == 5 && vectors.ndim() == 3, "bounds have five dimensions, vectors three");
    check(is_bfloat16(blocks) == is_bfloat16(vectors), "bounds and vectors are of different dtypes");
    check(reinterpret_cast<uintptr_t>(blocks.data_ptr()) % kVectorBytes == 0, "pages are not aligned");
    const bool is_dense = blocks.stride(4) == 1 && blocks.stride(3) == size && blocks.stride(2) == blocks.size(3) * size
                          && blocks.stride(1) == 2 * blocks.stride(2);
    check(is_dense, "pages are scattered");
    check(vectors.stride(2) == 1 && (vectors.size(1) == 1 || vectors.stride(1) == size), "heads lie apart");
    check(
        vectors.stride(0) % kBoundsVector == 0 && blocks.stride(0) % kBoundsVector == 0, "vectors of 8 elements only"
    );
    check(size % kBoundsVector == 0 && size <= kMaxBoundsSize, "the head size is over 256 or not a multiple of 8");
    return {
        blocks.data_ptr(),
        matrix<int32_t>(table, "table"),
        blocks.stride(0),
        table.stride(0),
        static_cast<int32_t>(blocks.size(1)),
        max_pages,
        static_cast<int32_t>(blocks.size(3)),
        size,
        page_size,
    };
}

void update_page_bounds(
    TensorView table,
    TensorView blocks,
    TensorView latest,
    TensorView request_indices,
    TensorView keys,
    TensorView positions,
    int32_t page_size,
    int64_t stream
) {
    const PageBounds bounds = page_bounds_of(table, blocks, keys, page_size, 0);
    const auto num_latest = static_cast<int32_t>(latest.size(1));
    if (num_latest > 0) {
        check(latest.IsContiguous() && is_bfloat16(latest) == is_bfloat16(blocks), "latest bounds are scattered");
    }
    check(launch_update_page_bounds(
        bounds, {num_latest > 0 ? latest.data_ptr() : nullptr, num_latest},
        contiguous<int64_t>(request_indices, "request_indices"), contiguous<int64_t>(positions, "positions"),
        keys.data_ptr(), keys.stride(0), static_cast<int32_t>(request_indices.size(0)), is_bfloat16(keys),
        stream_of(stream)
    ));
}

void page_scores(
    TensorView table,
    TensorView blocks,
    TensorView request_indices,
    TensorView query,
    TensorView num_tokens,
    int32_t page_size,
    TensorView scores,
    int64_t stream
) {
    const PageBounds bounds = page_bounds_of(table, blocks, query, page_size, static_cast<int32_t>(scores.size(2)));
    check(launch_page_scores(
        bounds, contiguous<int64_t>(request_indices, "request_indices"), contiguous<int64_t>(num_tokens, "num_tokens"),
        query.data_ptr(), query.stride(0), static_cast<int32_t>(query.size(1)) / bounds.num_heads,
        static_cast<int32_t>(query.size(0)), is_bfloat16(query), contiguous<float>(scores, "scores"), stream_of(stream)
    ));
}

constexpr int64_t kKeyElements = 128;  // of an indexer key
constexpr int64_t kNarrowKeyBytes = 68;
constexpr int64_t kWideKeyBytes = 132;
constexpr int64_t kKeyBlockSize = 64;

// NOTE: DLPack does not keep the stride of a dimension that has one entry.
NarrowKeys narrow_keys_of(const TensorView& cache) {
    check(cache.ndim() == 3 && cache.size(2) == kNarrowKeyBytes, "a cache of keys in 4 bits is [blocks, keys, 68]");
    check(
        element_bytes(cache) == 1 && cache.stride(2) == 1 && cache.stride(1) == kNarrowKeyBytes, "keys are scattered"
    );
    const bool is_aligned = reinterpret_cast<uintptr_t>(cache.data_ptr()) % kVectorBytes == 0
                            && (cache.size(0) <= 1 || cache.stride(0) % kVectorBytes == 0) && cache.size(1) % 4 == 0;
    check(is_aligned, "blocks of keys are not aligned");
    return {static_cast<uint8_t*>(cache.data_ptr()), cache.stride(0), static_cast<int32_t>(cache.size(1))};
}

// A matrix of bytes that is aligned for vectors.
uint8_t* bytes_of(const TensorView& tensor, int64_t row_bytes, const char* name) {
    const bool is_matrix = tensor.ndim() == 2 && tensor.IsContiguous() && element_bytes(tensor) == 1;
    if (!is_matrix || tensor.size(1) != row_bytes) TVM_FFI_THROW(ValueError) << name << " has rows of another size";
    const auto first = static_cast<uint8_t*>(tensor.data_ptr());
    if (reinterpret_cast<uintptr_t>(first) % sizeof(float) != 0) TVM_FFI_THROW(ValueError) << name << " is not aligned";
    return first;
}

void insert_indexer_keys(TensorView cache, TensorView keys, TensorView slots, int64_t stream) {
    const DLDataType type = keys.dtype();
    if (type.code != kDLBfloat || type.bits != 16) TVM_FFI_THROW(TypeError) << "keys are bfloat16, not " << type;
    const bool is_aligned =
        reinterpret_cast<uintptr_t>(keys.data_ptr()) % 4 == 0 && (keys.size(0) <= 1 || keys.stride(0) % 2 == 0);
    check(keys.ndim() == 2 && keys.size(1) == kKeyElements && keys.stride(1) == 1 && is_aligned, "keys are scattered");
    check(slots.size(0) == keys.size(0), "keys and slots are of other tokens");
    check(launch_insert_indexer_keys(
        narrow_keys_of(cache), keys.data_ptr(), keys.stride(0), contiguous<int64_t>(slots, "slots"), keys.size(0),
        stream_of(stream)
    ));
}

void gather_indexer_keys(
    TensorView cache,
    TensorView block_table,
    TensorView cu_seq_lens,
    TensorView values,
    TensorView scales,
    int64_t stream
) {
    check(values.size(0) == scales.size(0), "values and scales are of other tokens");
    check(launch_gather_indexer_keys(
        narrow_keys_of(cache), matrix<int32_t>(block_table, "block_table"), block_table.stride(0),
        contiguous<int32_t>(cu_seq_lens, "cu_seq_lens"), static_cast<int32_t>(cu_seq_lens.size(0)) - 1,
        bytes_of(values, kKeyElements, "values"), bytes_of(scales, sizeof(float), "scales"), values.size(0),
        stream_of(stream)
    ));
}

void convert_indexer_keys(const TensorView& wide, const TensorView& narrow, bool to_narrow, int64_t stream) {
    check(wide.size(0) == narrow.size(0), "as many blocks in 8 as in 4 bits");
    check(launch_convert_indexer_keys(
        bytes_of(wide, kKeyBlockSize * kWideKeyBytes, "wide"),
        bytes_of(narrow, kKeyBlockSize * kNarrowKeyBytes, "narrow"), wide.size(0), to_narrow, stream_of(stream)
    ));
}

void narrow_indexer_keys(TensorView wide, TensorView narrow, int64_t stream) {
    convert_indexer_keys(wide, narrow, true, stream);
}

void widen_indexer_keys(TensorView narrow, TensorView wide, int64_t stream) {
    convert_indexer_keys(wide, narrow, false, stream);
}

void indexer_logits(
    TensorView cache,
    TensorView query,
    TensorView weights,
    TensorView seq_lens,
    TensorView block_table,
    TensorView logits,
    int64_t stream
) {
    check(query.ndim() == 4 && query.IsContiguous() && element_bytes(query) == 1, "queries are no contiguous fp8");
    check(query.size(3) == kKeyElements, "queries have 128 elements");
    check(reinterpret_cast<uintptr_t>(query.data_ptr()) % kVectorBytes == 0, "queries are not aligned");
    const int64_t num_requests = query.size(0), num_queries = query.size(1), num_heads = query.size(2);
    const bool has_weights = weights.size(0) == num_requests * num_queries && weights.size(1) == num_heads;
    check(has_weights && logits.size(0) == weights.size(0), "weights or logits are of other queries");
    check(seq_lens.size(0) == num_requests && seq_lens.size(1) >= 1, "lengths are of other requests");
    check(block_table.size(0) >= num_requests, "the block table lacks requests");
    check(logits.size(1) % kKeyBlockSize == 0, "logits need room for whole blocks");
    const NarrowKeys keys = narrow_keys_of(cache);
    check(launch_indexer_logits(
        keys,
        {
            static_cast<const uint8_t*>(query.data_ptr()),
            matrix<float>(weights, "weights"),
            matrix<int32_t>(seq_lens, "seq_lens") + seq_lens.size(1) - 1,
            matrix<int32_t>(block_table, "block_table"),
            seq_lens.stride(0),
            weights.stride(0),
            block_table.stride(0),
            static_cast<int32_t>(num_requests),
            static_cast<int32_t>(num_queries),
            static_cast<int32_t>(num_heads),
        },
        matrix<float>(logits, "logits"), logits.stride(0), stream_of(stream)
    ));
}

// Return the address of managed memory that stays in host memory.
int64_t allocate_managed_memory(int64_t num_bytes, int64_t device) {
    void* memory = nullptr;
    check(allocate_managed(static_cast<size_t>(num_bytes), static_cast<int>(device), &memory));
    return reinterpret_cast<int64_t>(memory);
}

// Map this memory in the device's page tables.
void map_managed_memory(int64_t address, int64_t num_bytes, int64_t device) {
    check(map_managed(reinterpret_cast<void*>(address), static_cast<size_t>(num_bytes), static_cast<int>(device)));
}

// Free this memory.
void free_managed_memory(int64_t address) {
    check(free_managed(reinterpret_cast<void*>(address)));
}

// Return the limits that the library was built with, by their names in vllm_hisparse/ops/limits.py.
ffi::Map<ffi::String, int64_t> limits() {
    return {
        {"INTERFACE_VERSION", kInterfaceVersion},
        {"MAX_AGE", kMaxAge},
        {"USE_BONUS", kUseBonus},
        {"MAX_BONUS", kMaxBonus},
        {"MAX_TOP_K", kMaxTopK},
        {"MAX_QUERY_LEN", kMaxQueryLen},
        {"MAX_COLUMNS", kMaxColumns},
        {"MAX_HOT_ROWS", kMaxHotRows},
        {"MAX_LAYERS", kMaxLayers},
        {"NUM_STREAMS", kNumStreams},
        {"VECTOR_BYTES", kVectorBytes},
    };
}

}  // namespace
}  // namespace hisparse

TVM_FFI_DLL_EXPORT_TYPED_FUNC(limits, hisparse::limits);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(allocate_managed, hisparse::allocate_managed_memory);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(map_managed, hisparse::map_managed_memory);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(free_managed, hisparse::free_managed_memory);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hot_rows, hisparse::hot_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(residency, hisparse::residency);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode_metadata, hisparse::decode_metadata);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(resolved, hisparse::resolved);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(unit_metadata, hisparse::unit_metadata);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layer_group, hisparse::layer_group);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(resolve, hisparse::resolve);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather, hisparse::gather);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(swap_in, hisparse::swap_in);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(compact_rows, hisparse::compact_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(newest_row_ids, hisparse::newest_row_ids);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(write_back, hisparse::write_back);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(stage_rows, hisparse::stage_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(save_rows, hisparse::save_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(begin_units, hisparse::begin_units);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(write_tokens, hisparse::write_tokens);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(empty_latest, hisparse::empty_latest);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(select_units, hisparse::select_units);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(select_positions, hisparse::select_positions);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(update_page_bounds, hisparse::update_page_bounds);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(page_scores, hisparse::page_scores);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(insert_indexer_keys, hisparse::insert_indexer_keys);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather_indexer_keys, hisparse::gather_indexer_keys);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(narrow_indexer_keys, hisparse::narrow_indexer_keys);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(widen_indexer_keys, hisparse::widen_indexer_keys);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(indexer_logits, hisparse::indexer_logits);
