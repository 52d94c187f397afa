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

// Where one selected row is, and the copy that brings it there. `place`, `miss_place`: of the column and of its miss.
__device__ inline void write_column(
    const Resolved& out, int64_t place, int64_t miss_place, int32_t hot_row, bool missed, int64_t host_row
) {
    out.hot_row_ids[place] = hot_row;
    if (!missed) return;
    out.miss_hot_row_ids[miss_place] = hot_row;
    out.miss_host_row_ids[miss_place] = host_row;
}

// Counts of one request, by one thread.
__device__ inline void report(int64_t* counts, int32_t request, const Tally& total, const Resolved& out, int batch_row) {
    out.num_misses[batch_row] = total.misses;
    atomicAdd(reinterpret_cast<unsigned long long*>(counts) + 2 * request, total.hits);
    atomicAdd(reinterpret_cast<unsigned long long*>(counts) + 2 * request + 1, total.misses);
}

// Padding: nothing is valid, nothing is missed.
__device__ inline void resolve_padding(const Resolved& out, int batch_row) {
    for (int column = threadIdx.x; column < out.top_k; column += kNumThreads) {
        out.hot_row_ids[static_cast<int64_t>(batch_row) * out.top_k + column] = -1;
    }
    if (threadIdx.x == 0) out.num_valid[batch_row] = out.num_misses[batch_row] = 0;
}

// A sequence that fits: entry p is slot p and holds position p or nothing. Nothing is searched for, nothing moves.
template <int kColumnRounds>
__device__ inline void resolve_fitting(
    const Residency& residency,
    const StepTables& tables,
    const HotRows& hot,
    int64_t* counts,
    const Resolved& out,
    const Divisor& rows_per_block,
    const Divisor& block_size,
    const int32_t request,
    const int32_t newest,
    const int32_t (&selected)[kColumnRounds],
    uint64_t* warp_sums,
    int32_t* num_valid
) {
    const int batch_row = blockIdx.x;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    int32_t* positions = residency.positions + static_cast<int64_t>(request) * residency.num_slots;
    const int column_rounds = (out.top_k + kNumThreads - 1) / kNumThreads;
    const int first_column = warp * column_rounds * kWarpSize + lane;

    Tally sum{0, 0};
    uint32_t miss_bits = 0;
    int32_t last_valid = 0;
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        const bool wanted = selected[i] >= 0 && selected[i] < newest;
        const bool hit = wanted && positions[selected[i]] == selected[i];
        if (selected[i] >= 0 && selected[i] <= newest) last_valid = first_column + i * kWarpSize + 1;
        miss_bits |= (wanted && !hit) << i;
        sum.hits += __popc(__ballot_sync(kAllLanes, hit));
        sum.misses += __popc(__ballot_sync(kAllLanes, wanted && !hit));
    }
    last_valid = __reduce_max_sync(kAllLanes, last_valid);
    if (lane == 0) warp_sums[warp] = sum.pack();
    __syncthreads();
    if (lane == 0 && last_valid > 0) atomicMax(num_valid, last_valid);
    Tally before, total;
    scan_warps(warp_sums, warp, lane, before, total);

    const int64_t first_out = static_cast<int64_t>(batch_row) * out.top_k;
    int misses_before = before.misses;
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        const int column = first_column + i * kWarpSize;
        const bool missed = miss_bits >> i & 1;
        const int rank = take_rank(missed, lane, misses_before);
        if (i >= column_rounds || column >= out.top_k) continue;
        const int32_t slot = selected[i] <= newest ? selected[i] : -1;
        const auto row = static_cast<int32_t>(slot < 0 ? -1 : flat_hot_row(tables, hot, rows_per_block, batch_row, slot));
        const int64_t host_row = missed ? flat_host_row(tables, block_size, request, slot) : -1;
        write_column(out, first_out + column, first_out + rank, row, missed, host_row);
        if (missed) positions[slot] = slot;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    positions[newest] = newest;
    out.num_valid[batch_row] = *num_valid;
    report(counts, request, total, out, batch_row);
}

// One thread block per request. Each warp takes a run of entries and a run of columns, kWarpSize at a time, so that
// ballots give every order: nothing is sorted.
template <int kEntryRounds, int kColumnRounds>
__global__ void __launch_bounds__(kNumThreads, 1) resolve_kernel(
    const Residency residency,
    const StepTables tables,
    const int32_t* __restrict__ top_k,  // [batch, out.top_k], rows top_k_stride apart
    const int64_t top_k_stride,
    const HotRows hot,
    int64_t* counts,  // [num_requests, 2]
    const Resolved out,
    const Divisor rows_per_block,
    const Divisor block_size,
    const int bucket_bits
) {
    extern __shared__ int32_t memory[];
    __shared__ uint64_t warp_sums[kNumWarps];
    __shared__ int32_t num_valid;
    launch_dependents();
    const int batch_row = blockIdx.x;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int num_slots = residency.num_slots;
    const Scratch scratch(memory, out.top_k, bucket_bits);

    // Load the selection.
    const int32_t first_block = tables.hot_tables[batch_row * tables.hot_table_stride];
    const int32_t newest = tables.seq_lens[batch_row] - 1;
    const int column_rounds = (out.top_k + kNumThreads - 1) / kNumThreads;
    const int first_column = warp * column_rounds * kWarpSize + lane;
    int32_t selected[kColumnRounds];
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        const int column = first_column + i * kWarpSize;
        const bool exists = i < column_rounds && column < out.top_k;
        selected[i] = exists ? __ldg(top_k + batch_row * top_k_stride + column) : -1;
    }
    if (threadIdx.x == 0) num_valid = 0;
    const int32_t request = state_index(tables, first_block, newest + 1);
    if (request < 0 || request >= residency.num_requests) return resolve_padding(out, batch_row);
    if (newest < num_slots) {
        return resolve_fitting(
            residency, tables, hot, counts, out, rows_per_block, block_size, request, newest, selected, warp_sums,
            &num_valid
        );
    }
    scratch.clear();

    // Load the entries; they arrive while the hash table is filled.
    const int64_t first_state = static_cast<int64_t>(request) * num_slots;
    const int entry_rounds = (num_slots + kNumThreads - 1) / kNumThreads;
    const int first_entry = warp * entry_rounds * kWarpSize + lane;
    int32_t slots[kEntryRounds], positions[kEntryRounds];
#pragma unroll
    for (int i = 0; i < kEntryRounds; ++i) {
        const int entry = first_entry + i * kWarpSize;
        const bool exists = i < entry_rounds && entry < num_slots;
        slots[i] = exists ? residency.slots[first_state + entry] : -1;
        positions[i] = exists ? residency.positions[first_state + entry] : -1;
    }
    __syncthreads();

    // Map each wanted position to its column.
    int32_t last_valid = 0;
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        const int column = first_column + i * kWarpSize;
        if (i >= column_rounds || column >= out.top_k) continue;
        scratch.selected[column] = selected[i];
        scratch.chosen[column] = -1;
        if (selected[i] >= 0 && selected[i] < newest) scratch.insert(selected[i], column);
        if (selected[i] >= 0 && selected[i] <= newest) last_valid = column + 1;
    }
    last_valid = __reduce_max_sync(kAllLanes, last_valid);
    __syncthreads();
    if (lane == 0 && last_valid > 0) atomicMax(&num_valid, last_valid);

    // Find hits.
    Tally sum{0, 0};
    uint32_t hit_bits = 0;
#pragma unroll
    for (int i = 0; i < kEntryRounds; ++i) {
        if (i >= entry_rounds) continue;
        const int column = positions[i] >= 0 ? scratch.find(positions[i]) : -1;
        const bool hit = column >= 0;
        if (hit) scratch.chosen[column] = slots[i];
        hit_bits |= hit << i;
        sum.hits += __popc(__ballot_sync(kAllLanes, hit));
    }
    __syncthreads();

    // Count misses and fetch their host blocks.
    uint32_t miss_bits = 0;
    int64_t host_rows[kColumnRounds];
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        const int column = first_column + i * kWarpSize;
        const bool wanted = selected[i] >= 0 && selected[i] < newest;
        const bool missed = wanted && scratch.chosen[column] < 0;
        host_rows[i] = missed ? flat_host_row(tables, block_size, request, selected[i]) : -1;
        miss_bits |= missed << i;
        sum.misses += __popc(__ballot_sync(kAllLanes, missed));
    }
    if (lane == 0) warp_sums[warp] = sum.pack();
    __syncthreads();
    Tally before, total;
    scan_warps(warp_sums, warp, lane, before, total);

    // List the misses in the order of `top_k`, and their victims in the order of the entries.
    int misses_before = before.misses, others_before = warp * entry_rounds * kWarpSize - before.hits;
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        const bool missed = miss_bits >> i & 1;
        const int rank = take_rank(missed, lane, misses_before);
        if (missed) scratch.missed[rank] = selected[i];
    }
#pragma unroll
    for (int i = 0; i < kEntryRounds; ++i) {
        if (i >= entry_rounds) continue;
        const bool other = slots[i] >= 0 && !(hit_bits >> i & 1);
        const int rank = take_rank(other, lane, others_before);
        if (other && rank < total.misses) scratch.victims[rank] = slots[i];
    }
    __syncthreads();

    // Write the hot rows in the order of `top_k`, and the misses.
    const int64_t first_out = static_cast<int64_t>(batch_row) * out.top_k;
    misses_before = before.misses;
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        const int column = first_column + i * kWarpSize;
        const bool missed = miss_bits >> i & 1;
        const int rank = take_rank(missed, lane, misses_before);
        if (i >= column_rounds || column >= out.top_k) continue;
        int32_t slot = scratch.chosen[column];
        if (missed) slot = scratch.victims[rank];
        if (selected[i] == newest) slot = num_slots;
        const auto row = static_cast<int32_t>(slot < 0 ? -1 : flat_hot_row(tables, hot, rows_per_block, batch_row, slot));
        write_column(out, first_out + column, first_out + rank, row, missed, host_rows[i]);
    }

    // Write the entries in their new order: kept ones, filled ones, hits.
    const int num_kept = num_slots - total.misses - total.hits;
    int hits_before = before.hits;
    others_before = warp * entry_rounds * kWarpSize - before.hits;
#pragma unroll
    for (int i = 0; i < kEntryRounds; ++i) {
        if (i >= entry_rounds) continue;
        const bool exists = slots[i] >= 0, hit = hit_bits >> i & 1;
        const int hit_rank = take_rank(hit, lane, hits_before);
        const int other_rank = take_rank(exists && !hit, lane, others_before);
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

    if (threadIdx.x != 0) return;
    out.num_valid[batch_row] = num_valid;
    report(counts, request, total, out, batch_row);
}

using Kernel =
    void (*)(Residency, StepTables, const int32_t*, int64_t, HotRows, int64_t*, Resolved, Divisor, Divisor, int);

constexpr int kMaxColumnRounds = 4;

// The smallest kernel whose rounds cover a request; null where none does.
Kernel choose_kernel(int num_slots, int top_k) {
    if (num_slots <= 4 * kNumThreads && top_k <= 2 * kNumThreads) return resolve_kernel<4, 2>;
    if (num_slots <= 8 * kNumThreads && top_k <= 2 * kNumThreads) return resolve_kernel<8, 2>;
    if (num_slots <= 16 * kNumThreads && top_k <= kMaxColumnRounds * kNumThreads) {
        return resolve_kernel<16, kMaxColumnRounds>;
    }
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
    const size_t max_bytes = Scratch::num_bytes(kMaxColumnRounds * kNumThreads);
    const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
    if (const cudaError_t error = cudaFuncSetAttribute(kernel, attribute, max_bytes)) return error;
    const Divisor rows_per_block(hot->rows_per_block), block_size(tables->block_size);
    const int bucket_bits = Scratch::bucket_bits(out->top_k);
    kernel<<<tables->batch, kNumThreads, Scratch::num_bytes(out->top_k), stream>>>(
        *residency, *tables, top_k, top_k_stride, *hot, counts, *out, rows_per_block, block_size, bucket_bits
    );
    return cudaGetLastError();
}
