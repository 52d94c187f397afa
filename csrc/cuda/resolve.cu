#include "resolve.cuh"

namespace hisparse {
namespace {

// Counts of entries and columns before some place: one 64-bit sum adds both.
struct Tally {
    int32_t hits;
    int32_t misses;

    __device__ uint64_t pack() const {
        return static_cast<uint64_t>(misses) << 32 | static_cast<uint32_t>(hits);
    }
    __device__ static Tally unpack(uint64_t packed) {
        return {static_cast<int32_t>(packed), static_cast<int32_t>(packed >> 32)};
    }
};

// Shared memory of one request: a hash table of the wanted columns, chained. The lists of the misses take the place of
// the chains' heads, which are no longer read by then.
struct Scratch {
    static constexpr int kBucketsPerColumn = 4;  // at least
    static constexpr int kEnd = -1;              // of a chain

    int32_t* heads;     // [2^bucket_bits] column whose position falls in the bucket, or kEnd
    int32_t* selected;  // [top_k]
    int32_t* chosen;    // [top_k] slot of a hit, else -1
    int16_t* next;      // [top_k] next column of the chain, or kEnd
    int32_t* missed;    // [top_k] position of each miss, in the order of `top_k`
    int32_t* victims;   // [top_k] slot that each takes
    int num_buckets;

    __device__ Scratch(int32_t* memory, int top_k, int bucket_bits)
        : heads(memory),
          selected(memory + (1 << bucket_bits)),
          chosen(selected + top_k),
          next(reinterpret_cast<int16_t*>(chosen + top_k)),
          missed(memory),
          victims(memory + top_k),
          num_buckets(1 << bucket_bits) {}

    static int bucket_bits(int top_k) {
        int bits = 2;
        while (1 << bits < kBucketsPerColumn * top_k) ++bits;
        return bits;
    }
    static size_t num_bytes(int top_k) {
        const size_t column_bytes = 2 * sizeof(int32_t) + sizeof(int16_t);
        return (sizeof(int32_t) << bucket_bits(top_k)) + column_bytes * top_k;
    }

    __device__ void clear() const {
        const auto vectors = reinterpret_cast<int4*>(heads);
        for (int i = threadIdx.x; i < num_buckets / 4; i += kNumThreads) vectors[i] = {kEnd, kEnd, kEnd, kEnd};
    }
    __device__ int32_t* head(int32_t position) const {
        return heads + (position & (num_buckets - 1));
    }
    __device__ void insert(int32_t position, int column) const {
        next[column] = static_cast<int16_t>(atomicExch(head(position), column));
    }
    __device__ int find(int32_t position) const {
        int column = *head(position);
        while (column != kEnd && selected[column] != position) column = next[column];
        return column;
    }
};

// Sum over the warps before this one, and over all. `sums`: [kNumWarps] in shared memory.
__device__ inline void scan_warps(const uint64_t* sums, int warp, int lane, Tally& before, Tally& total) {
    uint64_t sum = sums[lane];
#pragma unroll
    for (int distance = 1; distance < kNumWarps; distance *= 2) {
        const uint64_t other = __shfl_up_sync(kAllLanes, sum, distance);
        if (lane >= distance) sum += other;
    }
    total = Tally::unpack(__shfl_sync(kAllLanes, sum, kNumWarps - 1));
    const uint64_t previous = __shfl_sync(kAllLanes, sum, warp > 0 ? warp - 1 : 0);
    before = Tally::unpack(warp > 0 ? previous : 0);
}

// Rank of this lane, if it is `chosen`, among the lanes that are; `before`: how many precede this round, then the next.
__device__ inline int take_rank(bool chosen, int lane, int& before) {
    const uint32_t mask = __ballot_sync(kAllLanes, chosen);
    const int rank = before + __popc(mask & ((1u << lane) - 1));
    before += __popc(mask);
    return rank;
}

// Write where one selected row is, and the copy that brings it there. place, miss_place: of the column, of its miss.
__device__ inline void write_column(
    const Resolved& out, int64_t place, int64_t miss_place, int32_t hot_row_id, bool missed, int64_t host_row_id
) {
    out.hot_row_ids[place] = hot_row_id;
    if (!missed) return;
    out.miss_hot_row_ids[miss_place] = hot_row_id;
    out.miss_host_row_ids[miss_place] = host_row_id;
}

// A request and where its rows are.
struct Request {
    const StepTables& tables;
    const HotRows& hot;
    const Divisor& rows_per_block;
    const Divisor& block_size;
    int batch_index;
    int32_t state_index;
    int32_t newest;  // position

    // -1 where `slot` is.
    __device__ int32_t hot_row_id(int32_t slot) const {
        return static_cast<int32_t>(slot < 0 ? -1 : flat_hot_row_id(tables, hot, rows_per_block, batch_index, slot));
    }
    __device__ int64_t host_row_id(int32_t position) const {
        return flat_host_row_id(tables, block_size, state_index, position);
    }
};

// What a thread handles of `size` columns or entries: each warp has a run of them and takes kWarpSize of it per round.
struct Share {
    int size;
    int rounds;
    int run_start;  // of the warp
    int first;      // of the thread

    __device__ explicit Share(int size)
        : size(size),
          rounds((size + kNumThreads - 1) / kNumThreads),
          run_start(warp_index() * rounds * kWarpSize),
          first(run_start + lane_index()) {}
    __device__ int at(int round) const { return first + round * kWarpSize; }
    __device__ bool has(int round) const { return round < rounds && at(round) < size; }
};

// Padding: nothing is valid, nothing is missed.
__device__ __forceinline__ void resolve_padding(const Resolved& out, int batch_index) {
    for (int column = threadIdx.x; column < out.top_k; column += kNumThreads) {
        out.hot_row_ids[static_cast<int64_t>(batch_index) * out.top_k + column] = -1;
    }
    if (threadIdx.x == 0) out.num_valid[batch_index] = out.num_misses[batch_index] = 0;
}

// selected: positions of the thread's columns; -1 beyond.
template <int kColumnRounds>
__device__ __forceinline__ void load_selection(
    const int32_t* top_k, const Share& columns, int32_t (&selected)[kColumnRounds]
) {
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) selected[i] = columns.has(i) ? __ldg(top_k + columns.at(i)) : -1;
}

// slots, positions: the thread's entries; -1 beyond.
template <int kEntryRounds>
__device__ __forceinline__ void load_entries(
    const Residency& residency,
    int64_t first_state,
    const Share& entries,
    int32_t (&slots)[kEntryRounds],
    int32_t (&positions)[kEntryRounds]
) {
#pragma unroll
    for (int i = 0; i < kEntryRounds; ++i) {
        slots[i] = entries.has(i) ? residency.slots[first_state + entries.at(i)] : -1;
        positions[i] = entries.has(i) ? residency.positions[first_state + entries.at(i)] : -1;
    }
}

// Fill the hash table: each wanted position with its column. Returns one more than the warp's last valid column, or 0.
template <int kColumnRounds>
__device__ __forceinline__ int32_t map_columns(
    const Scratch& scratch, const Request& request, const Share& columns, const int32_t (&selected)[kColumnRounds]
) {
    int32_t last_valid = 0;
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        const int column = columns.at(i);
        if (!columns.has(i)) continue;
        scratch.selected[column] = selected[i];
        scratch.chosen[column] = -1;
        if (selected[i] >= 0 && selected[i] < request.newest) scratch.insert(selected[i], column);
        if (selected[i] >= 0 && selected[i] <= request.newest) last_valid = column + 1;
    }
    return __reduce_max_sync(kAllLanes, last_valid);
}

// Give the column of each hit its slot and count the warp's hits. Returns the thread's rounds with a hit as bits.
template <int kEntryRounds>
__device__ __forceinline__ uint32_t find_hits(
    const Scratch& scratch,
    const Share& entries,
    const int32_t (&slots)[kEntryRounds],
    const int32_t (&positions)[kEntryRounds],
    Tally& sum
) {
    uint32_t hit_bits = 0;
#pragma unroll
    for (int i = 0; i < kEntryRounds; ++i) {
        if (i >= entries.rounds) continue;
        const int column = positions[i] >= 0 ? scratch.find(positions[i]) : -1;
        const bool hit = column >= 0;
        if (hit) scratch.chosen[column] = slots[i];
        hit_bits |= hit << i;
        sum.hits += __popc(__ballot_sync(kAllLanes, hit));
    }
    return hit_bits;
}

// Count the warp's misses and look their host rows up. Returns the thread's rounds with a miss as bits.
template <int kColumnRounds>
__device__ __forceinline__ uint32_t find_misses(
    const Scratch& scratch,
    const Request& request,
    const Share& columns,
    const int32_t (&selected)[kColumnRounds],
    int64_t (&host_row_ids)[kColumnRounds],
    Tally& sum
) {
    uint32_t miss_bits = 0;
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        const bool wanted = selected[i] >= 0 && selected[i] < request.newest;
        const bool missed = wanted && scratch.chosen[columns.at(i)] < 0;
        host_row_ids[i] = missed ? request.host_row_id(selected[i]) : -1;
        miss_bits |= missed << i;
        sum.misses += __popc(__ballot_sync(kAllLanes, missed));
    }
    return miss_bits;
}

// List the misses in the order of `top_k`.
template <int kColumnRounds>
__device__ __forceinline__ void list_misses(
    const Scratch& scratch, const int32_t (&selected)[kColumnRounds], uint32_t miss_bits, int misses_before
) {
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        const bool missed = miss_bits >> i & 1;
        const int rank = take_rank(missed, lane_index(), misses_before);
        if (missed) scratch.missed[rank] = selected[i];
    }
}

// List the victims of the misses, the first entries that are no hits.
template <int kEntryRounds>
__device__ __forceinline__ void list_victims(
    const Scratch& scratch,
    const Share& entries,
    const int32_t (&slots)[kEntryRounds],
    uint32_t hit_bits,
    int others_before,
    int num_misses
) {
#pragma unroll
    for (int i = 0; i < kEntryRounds; ++i) {
        if (i >= entries.rounds) continue;
        const bool other = slots[i] >= 0 && !(hit_bits >> i & 1);
        const int rank = take_rank(other, lane_index(), others_before);
        if (other && rank < num_misses) scratch.victims[rank] = slots[i];
    }
}

// Write where each selected row is, and the misses, both in the order of `top_k`.
template <int kColumnRounds>
__device__ __forceinline__ void write_columns(
    const Resolved& out,
    const Scratch& scratch,
    const Request& request,
    const Share& columns,
    const int32_t (&selected)[kColumnRounds],
    const int64_t (&host_row_ids)[kColumnRounds],
    uint32_t miss_bits,
    int misses_before,
    int32_t num_slots
) {
    const int64_t first_out = static_cast<int64_t>(request.batch_index) * out.top_k;
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        const int column = columns.at(i);
        const bool missed = miss_bits >> i & 1;
        const int rank = take_rank(missed, lane_index(), misses_before);
        if (!columns.has(i)) continue;
        int32_t slot = scratch.chosen[column];
        if (missed) slot = scratch.victims[rank];
        if (selected[i] == request.newest) slot = num_slots;
        const int32_t hot_row_id = request.hot_row_id(slot);
        write_column(out, first_out + column, first_out + rank, hot_row_id, missed, host_row_ids[i]);
    }
}

// Write the entries in their new order: kept ones, filled ones, hits.
template <int kEntryRounds>
__device__ __forceinline__ void write_entries(
    const Residency& residency,
    const Scratch& scratch,
    int64_t first_state,
    const Share& entries,
    const int32_t (&slots)[kEntryRounds],
    int32_t (&positions)[kEntryRounds],
    uint32_t hit_bits,
    int hits_before,
    int others_before,
    const Tally& total
) {
    const int num_kept = residency.num_slots - total.misses - total.hits;
#pragma unroll
    for (int i = 0; i < kEntryRounds; ++i) {
        if (i >= entries.rounds) continue;
        const bool exists = slots[i] >= 0, hit = hit_bits >> i & 1;
        const int hit_rank = take_rank(hit, lane_index(), hits_before);
        const int other_rank = take_rank(exists && !hit, lane_index(), others_before);
        const int fill_rank = min(other_rank, total.misses);
        const bool filled = !hit && fill_rank < total.misses;
        if (!exists) continue;
        int entry = other_rank - fill_rank;
        if (filled) entry = num_kept + fill_rank;
        if (hit) entry = num_kept + total.misses + hit_rank;
        if (filled) positions[i] = scratch.missed[fill_rank];
        residency.slots[first_state + entry] = slots[i];
        residency.positions[first_state + entry] = positions[i];
    }
}

// Counts of one request, by one thread.
__device__ __forceinline__ void report(
    int64_t* counts, const Request& request, const Tally& total, int32_t num_valid, const Resolved& out
) {
    out.num_valid[request.batch_index] = num_valid;
    out.num_misses[request.batch_index] = total.misses;
    const auto own_counts = reinterpret_cast<unsigned long long*>(counts) + 2 * request.state_index;
    atomicAdd(own_counts, total.hits);
    atomicAdd(own_counts + 1, total.misses);
}

// Count the warp's hits and misses of a sequence that fits: the entry of each selected position tells. Returns the
// thread's rounds with a miss as bits. last_valid: one more than the warp's last valid column, or 0.
template <int kColumnRounds>
__device__ __forceinline__ uint32_t find_fitting_misses(
    const int32_t* positions,
    const Request& request,
    const Share& columns,
    const int32_t (&selected)[kColumnRounds],
    Tally& sum,
    int32_t& last_valid
) {
    uint32_t miss_bits = 0;
    last_valid = 0;
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        const bool wanted = selected[i] >= 0 && selected[i] < request.newest;
        const bool hit = wanted && positions[selected[i]] == selected[i];
        if (selected[i] >= 0 && selected[i] <= request.newest) last_valid = columns.at(i) + 1;
        miss_bits |= (wanted && !hit) << i;
        sum.hits += __popc(__ballot_sync(kAllLanes, hit));
        sum.misses += __popc(__ballot_sync(kAllLanes, wanted && !hit));
    }
    last_valid = __reduce_max_sync(kAllLanes, last_valid);
    return miss_bits;
}

// Write where each selected row is, and the misses, both in the order of `top_k`; a miss takes the slot of its number.
template <int kColumnRounds>
__device__ __forceinline__ void write_fitting_columns(
    const Resolved& out,
    int32_t* positions,
    const Request& request,
    const Share& columns,
    const int32_t (&selected)[kColumnRounds],
    uint32_t miss_bits,
    int misses_before
) {
    const int64_t first_out = static_cast<int64_t>(request.batch_index) * out.top_k;
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        const int column = columns.at(i);
        const bool missed = miss_bits >> i & 1;
        const int rank = take_rank(missed, lane_index(), misses_before);
        if (!columns.has(i)) continue;
        const int32_t slot = selected[i] <= request.newest ? selected[i] : -1;
        const int32_t hot_row_id = request.hot_row_id(slot);
        const int64_t host_row_id = missed ? request.host_row_id(slot) : -1;
        write_column(out, first_out + column, first_out + rank, hot_row_id, missed, host_row_id);
        if (missed) positions[slot] = slot;
    }
}

// A sequence that fits: entry p is slot p and holds position p or nothing. Nothing is searched for, nothing moves.
template <int kColumnRounds>
__device__ __forceinline__ void resolve_fitting(
    const Residency& residency,
    const Request& request,
    int64_t* counts,
    const Resolved& out,
    const Share& columns,
    const int32_t (&selected)[kColumnRounds],
    uint64_t* warp_sums,
    int32_t* num_valid
) {
    int32_t* positions = residency.positions + static_cast<int64_t>(request.state_index) * residency.num_slots;
    Tally sum{0, 0}, before, total;
    int32_t last_valid;
    const uint32_t miss_bits = find_fitting_misses(positions, request, columns, selected, sum, last_valid);
    if (lane_index() == 0) warp_sums[warp_index()] = sum.pack();
    __syncthreads();
    if (lane_index() == 0 && last_valid > 0) atomicMax(num_valid, last_valid);
    scan_warps(warp_sums, warp_index(), lane_index(), before, total);
    write_fitting_columns(out, positions, request, columns, selected, miss_bits, before.misses);
    __syncthreads();
    if (threadIdx.x != 0) return;
    positions[request.newest] = request.newest;
    report(counts, request, total, *num_valid, out);
}

// A sequence that has outgrown its buffer: hits by hash table, victims by order, then everything is written.
template <int kEntryRounds, int kColumnRounds>
__device__ __forceinline__ void resolve_evicting(
    const Residency& residency,
    const Request& request,
    int64_t* counts,
    const Resolved& out,
    const Share& columns,
    const int32_t (&selected)[kColumnRounds],
    const Scratch& scratch,
    uint64_t* warp_sums,
    int32_t* num_valid
) {
    const Share entries(residency.num_slots);
    const int64_t first_state = static_cast<int64_t>(request.state_index) * residency.num_slots;
    int32_t slots[kEntryRounds], positions[kEntryRounds];
    scratch.clear();
    load_entries(residency, first_state, entries, slots, positions);  // they arrive while the hash table is filled
    __syncthreads();

    const int32_t last_valid = map_columns(scratch, request, columns, selected);
    __syncthreads();
    if (lane_index() == 0 && last_valid > 0) atomicMax(num_valid, last_valid);

    Tally sum{0, 0}, before, total;
    const uint32_t hit_bits = find_hits(scratch, entries, slots, positions, sum);
    __syncthreads();

    int64_t host_row_ids[kColumnRounds];
    const uint32_t miss_bits = find_misses(scratch, request, columns, selected, host_row_ids, sum);
    if (lane_index() == 0) warp_sums[warp_index()] = sum.pack();
    __syncthreads();
    scan_warps(warp_sums, warp_index(), lane_index(), before, total);

    const int others_before = entries.run_start - before.hits;
    list_misses(scratch, selected, miss_bits, before.misses);
    list_victims(scratch, entries, slots, hit_bits, others_before, total.misses);
    __syncthreads();

    write_columns(
        out, scratch, request, columns, selected, host_row_ids, miss_bits, before.misses, residency.num_slots
    );
    write_entries(
        residency, scratch, first_state, entries, slots, positions, hit_bits, before.hits, others_before, total
    );
    if (threadIdx.x == 0) report(counts, request, total, *num_valid, out);
}

// One thread block per request. Each warp takes a run of entries and a run of columns, kWarpSize at a time, so that
// ballots give every order: nothing is sorted.
template <int kEntryRounds, int kColumnRounds>
__global__ void __launch_bounds__(kNumThreads, 1) resolve_kernel(
    const Residency residency,
    const StepTables tables,
    const int32_t* __restrict__ top_k,  // [batch, out.top_k], requests top_k_stride elements apart
    const int64_t top_k_stride,
    const HotRows hot,
    int64_t* counts,  // [num_states, 2]
    const Resolved out,
    const Divisor rows_per_block,
    const Divisor block_size,
    const int bucket_bits
) {
    extern __shared__ int32_t memory[];
    __shared__ uint64_t warp_sums[kNumWarps];
    __shared__ int32_t num_valid;
    launch_dependents();
    const int batch_index = blockIdx.x;
    const Scratch scratch(memory, out.top_k, bucket_bits);
    const Share columns(out.top_k);

    const int32_t first_block = tables.hot_tables[batch_index * tables.hot_table_stride];
    const int32_t newest = tables.seq_lens[batch_index] - 1;
    int32_t selected[kColumnRounds];
    load_selection(top_k + batch_index * top_k_stride, columns, selected);
    if (threadIdx.x == 0) num_valid = 0;
    const int32_t state_index = find_state(tables, first_block, newest + 1);
    if (state_index < 0 || state_index >= residency.num_states) return resolve_padding(out, batch_index);

    const Request request{tables, hot, rows_per_block, block_size, batch_index, state_index, newest};
    if (newest < residency.num_slots) {
        return resolve_fitting(residency, request, counts, out, columns, selected, warp_sums, &num_valid);
    }
    resolve_evicting<kEntryRounds>(
        residency, request, counts, out, columns, selected, scratch, warp_sums, &num_valid
    );
}

using Kernel =
    void (*)(Residency, StepTables, const int32_t*, int64_t, HotRows, int64_t*, Resolved, Divisor, Divisor, int);

// The smallest kernel whose rounds cover a request; null where none does.
Kernel choose_kernel(int num_slots, int top_k) {
    constexpr int kMaxEntryRounds = kMaxSlots / kNumThreads, kMaxColumnRounds = kMaxTopK / kNumThreads;
    if (num_slots <= 4 * kNumThreads && top_k <= 2 * kNumThreads) return resolve_kernel<4, 2>;
    if (num_slots <= 8 * kNumThreads && top_k <= 2 * kNumThreads) return resolve_kernel<8, 2>;
    if (num_slots <= kMaxSlots && top_k <= kMaxTopK) return resolve_kernel<kMaxEntryRounds, kMaxColumnRounds>;
    return nullptr;
}

}  // namespace
}  // namespace hisparse

using namespace hisparse;

extern "C" cudaError_t hisparse_resolve(
    const Residency* residency,
    const StepTables* tables,
    const int32_t* top_k,
    int64_t top_k_stride,
    const HotRows* hot,
    int64_t* counts,
    const Resolved* out,
    cudaStream_t stream
) {
    if (tables->batch == 0) return cudaSuccess;
    const Kernel kernel = choose_kernel(residency->num_slots, out->top_k);
    if (kernel == nullptr) return cudaErrorInvalidValue;
    // NOTE: the limit is always the same: a graph keeps its launches, but reads this attribute of the kernel.
    const size_t max_bytes = Scratch::num_bytes(kMaxTopK);
    const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
    if (const cudaError_t error = cudaFuncSetAttribute(kernel, attribute, max_bytes)) return error;
    const Divisor rows_per_block(hot->rows_per_block), block_size(tables->block_size);
    const int bucket_bits = Scratch::bucket_bits(out->top_k);
    kernel<<<tables->batch, kNumThreads, Scratch::num_bytes(out->top_k), stream>>>(
        *residency, *tables, top_k, top_k_stride, *hot, counts, *out, rows_per_block, block_size, bucket_bits
    );
    return cudaGetLastError();
}
