#include <algorithm>
#include <utility>

#include "resolve_evicting.cuh"
#include "resolve_fitting.cuh"

namespace hisparse {
namespace {

constexpr int kLeastSlotsPerBlock = 4096;  // slots of a thread block from which on another block pays
constexpr int32_t kMaxKeptAges = 65536;    // slots whose ages are kept in shared memory, if there is room

// Write the output of padding: no valid entries and no misses.
__device__ __forceinline__ void resolve_padding(const Resolved& out, int batch_index, int max_query_len) {
    for (int column = threadIdx.x; column < out.num_columns; column += kNumThreads) {
        out.hot_row_ids[static_cast<int64_t>(batch_index) * out.num_columns + column] = -1;
    }
    if (threadIdx.x < max_query_len) out.num_valid[batch_index * max_query_len + threadIdx.x] = 0;
    if (threadIdx.x == 0) out.num_misses[batch_index] = 0;
}

// One thread block or one cluster of blocks per request. Each warp takes a run of columns and, if victims are chosen, a
// run of slots. In this way, ballots and prefix sums give every order, and nothing is sorted.
// kHasEqualRows: whether requests may have equal rows, or the rows of a layer are not next to each other. Without it,
// the place of a slot takes fewer instructions and registers.
template <int kColumnRounds, bool kHasDrafts, bool kIsCluster, bool kHasEqualRows>
__global__ void __launch_bounds__(kNumThreads, 1) resolve_kernel(
    const Residency residency,
    const DecodeMetadata decode,
    const int32_t* __restrict__ selected_positions,  // [batch, out.num_columns], requests selected_stride elements apart
    const int64_t selected_stride,
    const HotRows hot,
    int64_t* counts,  // [num_seqs, 2]
    const Resolved out,
    const Divisor rows_per_block,
    const Divisor equal_rows_per_block,
    const Divisor block_size,
    const Divisor selection_size,
    const int bucket_bits,
    const int32_t num_kept_ages
) {
    extern __shared__ __align__(kVectorBytes) int32_t memory[];
    __shared__ Shared shared;
    launch_dependents();
    const Cluster<kIsCluster> cluster;
    const int batch_index = blockIdx.x / cluster.size;
    const Scratch<kColumnRounds> scratch(memory, bucket_bits, num_kept_ages);
    const Share columns(out.num_columns);

    int32_t selected[kColumnRounds];
    load_selection(selected_positions + batch_index * selected_stride, columns, selected);
    const int32_t first_hot_block_id = decode.first_hot_block_ids[batch_index * decode.first_hot_block_stride];
    const int32_t seq_len = decode.seq_lens[batch_index], query_len = query_len_of(decode, batch_index);
    scratch.clear();  // while these loads are in flight
    if (threadIdx.x < kMaxQueryLen) shared.num_valid[threadIdx.x] = 0;
    if (threadIdx.x == 0) shared.cut = {-1, 0, 0, 0};
    if (threadIdx.x == 0) shared.num_found = 0;
    const int32_t seq_index = find_seq_of(decode, first_hot_block_id, seq_len);
    // Padding and requests that fit need only one thread block.
    if (seq_index < 0) {
        if (cluster.rank == 0) resolve_padding(out, batch_index, decode.max_query_len);
        return;
    }

    const NewPositions added(seq_len, query_len, decode.max_query_len, __ldg(decode.num_hot_rows + seq_index));
    const int32_t* hot_block_table = decode.hot_block_tables + seq_index * decode.hot_block_table_stride;
    asm("" : "+l"(hot_block_table));  // NOTE: without this, the compiler computes it for every slot
    const bool is_equal = kHasEqualRows && has_equal_rows(decode, seq_index);
    const Divisor rows = is_equal ? equal_rows_per_block : rows_per_block;
    const int32_t pitch = kHasEqualRows ? hot.pitch : 1;
    const int32_t entries_per_block = kHasEqualRows ? hot.entries_per_block : rows_per_block.divisor;
    const Request request{
        decode,     hot,         hot_block_table, rows, is_equal ? hot.equal_offset : 0, pitch, entries_per_block,
        block_size, batch_index, seq_index,       added
    };
    if (added.fits) {
        if (cluster.rank != 0) return;
        return resolve_fitting<kColumnRounds, kHasDrafts>(
            residency, request, counts, out, columns, selected, selection_size, shared
        );
    }
    resolve_evicting<kColumnRounds, kHasDrafts>(
        cluster, residency, request, counts, out, columns, selected, selection_size, scratch, shared
    );
}

// Properties of the current device that a launch needs.
struct Device {
    int max_shared_bytes;  // largest dynamic shared memory of a thread block
    int num_multiprocessors;
    int has_clusters;

    cudaError_t ask() {
        int device = 0;
        if (const cudaError_t error = cudaGetDevice(&device)) return error;
        const std::pair<int*, cudaDeviceAttr> asked[] = {
            {&max_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin},
            {&num_multiprocessors, cudaDevAttrMultiProcessorCount},
            {&has_clusters, cudaDevAttrClusterLaunch},
        };
        for (const auto& [value, attribute] : asked) {
            if (const cudaError_t error = cudaDeviceGetAttribute(value, attribute, device)) return error;
        }
        max_shared_bytes -= static_cast<int>(sizeof(Shared));
        return cudaSuccess;
    }
};

// A kernel whose rounds cover the columns of a request.
struct Variant {
    decltype(&resolve_kernel<2, false, false, false>) kernel;
    decltype(kernel) cluster_kernel;
    int column_rounds;  // 0: there is no such kernel

    template <int kColumnRounds, bool kHasDrafts, bool kHasEqualRows>
    static Variant of() {
        constexpr auto kernel = resolve_kernel<kColumnRounds, kHasDrafts, false, kHasEqualRows>;
        return {kernel, resolve_kernel<kColumnRounds, kHasDrafts, true, kHasEqualRows>, kColumnRounds};
    }
    template <int kColumnRounds, bool kHasDrafts>
    static Variant of(bool has_equal_rows) {
        return has_equal_rows ? of<kColumnRounds, kHasDrafts, true>() : of<kColumnRounds, kHasDrafts, false>();
    }
};

// Return the smallest such kernel.
Variant choose_variant(int num_columns, int max_query_len, bool has_equal_rows) {
    constexpr Variant kNone{};
    if (max_query_len < 1 || max_query_len > kMaxQueryLen || num_columns % max_query_len != 0) return kNone;
    if (num_columns > (max_query_len > 1 ? kMaxColumns : kMaxTopK)) return kNone;
    const bool has_drafts = max_query_len > 1;
    const bool is_small = num_columns <= 2 * kNumThreads;
    if (is_small) return has_drafts ? Variant::of<2, true>(has_equal_rows) : Variant::of<2, false>(has_equal_rows);
    const bool is_middle = num_columns <= 4 * kNumThreads;
    if (is_middle) return has_drafts ? Variant::of<4, true>(has_equal_rows) : Variant::of<4, false>(has_equal_rows);
    return Variant::of<kMaxColumns / kNumThreads, true>(has_equal_rows);
}

// Return the number of thread blocks of a request: as many as get enough slots each, if every block of the launch has a
// multiprocessor to itself. num_multiprocessors: number of multiprocessors that the launch may use.
int choose_cluster_size(int batch, int64_t num_hot_rows, int num_multiprocessors) {
    int size = kMaxClusterSize;
    while (size > 1 && (num_hot_rows < size * kLeastSlotsPerBlock || batch * size > num_multiprocessors)) size /= 2;
    return size;
}

}  // namespace

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
) {
    if (decode.batch == 0) return cudaSuccess;
    const int num_columns = out.num_columns;
    const int64_t num_hot_rows = static_cast<int64_t>(decode.num_hot_blocks) * hot.entries_per_block;
    const bool has_equal_rows = hot.equal_rows_per_block > 0 || hot.pitch != 1;
    const Variant variant = choose_variant(num_columns, decode.max_query_len, has_equal_rows);
    if (variant.column_rounds == 0 || num_hot_rows > kMaxHotRows) return cudaErrorInvalidValue;
    Device device{};
    if (const cudaError_t error = device.ask()) return error;
    const ScratchSize scratch{variant.column_rounds * kNumThreads};
    const int bucket_bits = scratch.bucket_bits(device.max_shared_bytes);
    if (bucket_bits == 0) return cudaErrorInvalidValue;
    const size_t num_bytes = scratch.num_bytes(bucket_bits);
    const auto room = static_cast<int64_t>((device.max_shared_bytes - num_bytes) / sizeof(uint16_t));
    const Divisor rows_per_block(hot.rows_per_block), block_size(decode.block_size);
    const Divisor equal_rows_per_block(std::max(hot.equal_rows_per_block, 1));
    const Divisor selection_size(num_columns / decode.max_query_len);

    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    cudaLaunchConfig_t config{};
    config.blockDim = kNumThreads;
    config.stream = stream;
    config.attrs = &attribute;
    const int num_multiprocessors = device.num_multiprocessors / (shares_device ? kNumStreams : 1);
    int size = device.has_clusters ? choose_cluster_size(decode.batch, num_hot_rows, num_multiprocessors) : 1;
    while (true) {
        const bool is_cluster = size > 1;
        const auto kernel = is_cluster ? variant.cluster_kernel : variant.kernel;
        // NOTE: the limit must always be the same, because a graph keeps its launches, but reads this attribute when it
        // runs.
        const auto limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
        if (const cudaError_t error = cudaFuncSetAttribute(kernel, limit, device.max_shared_bytes)) return error;
        const int64_t num_slots = std::min<int64_t>({num_hot_rows / size + kSlotsPerLoad, room, kMaxKeptAges});
        const auto num_kept_ages = static_cast<int32_t>(num_slots / kSlotsPerLoad * kSlotsPerLoad);
        attribute.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
        config.numAttrs = is_cluster ? 1 : 0;
        config.gridDim = decode.batch * size;
        config.dynamicSmemBytes = num_bytes + num_kept_ages * sizeof(uint16_t);
        int num_clusters = decode.batch;  // clusters that can run at the same time
        if (is_cluster) {
            if (const cudaError_t error = cudaOccupancyMaxActiveClusters(&num_clusters, kernel, &config)) return error;
        }
        if (num_clusters >= decode.batch) {
            return cudaLaunchKernelEx(
                &config, kernel, residency, decode, selected_positions, selected_stride, hot, counts, out,
                rows_per_block, equal_rows_per_block, block_size, selection_size, bucket_bits, num_kept_ages
            );
        }
        size /= 2;
    }
}

}  // namespace hisparse
