// Data of a request in the kernel of `resolve`, whether it fits or not: metadata, columns, counts.
#pragma once

#include "common.cuh"

namespace hisparse {

// Return the sum of the numbers of the warps before this one. numbers: [kNumWarps] in shared memory.
__device__ inline int32_t sum_before(const int32_t* numbers) {
    return __reduce_add_sync(kAllLanes, lane_index() < warp_index() ? numbers[lane_index()] : 0);
}

// Return the sum of the numbers of all warps.
__device__ inline int32_t sum_all(const int32_t* numbers) {
    return __reduce_add_sync(kAllLanes, numbers[lane_index()]);
}

// Numbers of hits and misses among columns, in one integer.
struct Tally {
    int32_t packed;

    __device__ static Tally of(int hits, int misses) { return {hits | misses << 16}; }
    __device__ int hits() const { return packed & 0xffff; }
    __device__ int misses() const { return packed >> 16; }
};
static_assert(kMaxColumns < 1 << 15);

// Return the sum of a number over this lane and the lanes before it.
__device__ inline int32_t sum_up_to(int32_t number) {
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const int32_t other = __shfl_up_sync(kAllLanes, number, distance);
        if (lane_index() >= distance) number += other;
    }
    return number;
}

// Return the rank of this lane among all `chosen` lanes. before: number of chosen lanes in earlier rounds; updated for
// the next round.
__device__ inline int take_rank(bool chosen, int lane, int& before) {
    const uint32_t mask = __ballot_sync(kAllLanes, chosen);
    const int rank = before + __popc(mask & ((1u << lane) - 1));
    before += __popc(mask);
    return rank;
}

// Write the place of one selected row, and its copy if it is missed. place, miss_place: places in the output of the
// column and of its miss.
__device__ inline void write_column(
    const Resolved& out, int64_t place, int64_t miss_place, int32_t hot_row_id, bool missed, int64_t host_row_id
) {
    out.hot_row_ids[place] = hot_row_id;
    if (!missed) return;
    out.miss_hot_row_ids[miss_place] = hot_row_id;
    out.miss_host_row_ids[miss_place] = host_row_id;
}

// A hot row: its flat id, and its entry in the residency.
struct Place {
    int32_t row_id;
    int32_t entry;
};

// A request and the places of its rows.
struct Request {
    const DecodeMetadata& decode;
    const HotRows& hot;
    const int32_t* hot_block_table;  // [decode.num_hot_blocks]
    // Division of the request's blocks: rows of the layer in a block, and their places.
    // NOTE: these are values, because a reference to one of two arguments of the kernel would be loaded for every slot.
    Divisor rows_per_block;
    int32_t first_row;
    int32_t pitch;
    int32_t entries_per_block;
    const Divisor& block_size;
    int batch_index;
    int32_t seq_index;
    NewPositions added;

    // slot: below the number of the request's hot rows.
    __device__ Place place(int32_t slot) const {
        const int32_t index = slot / rows_per_block, offset = slot - index * rows_per_block.divisor;
        const int32_t block = __ldg(hot_block_table + index);
        const int64_t row_id = block * hot.block_stride_rows + first_row + offset * pitch;
        return {static_cast<int32_t>(row_id), block * entries_per_block + offset};
    }
    __device__ int64_t host_row_id(int32_t position) const {
        return flat_host_row_id(decode, block_size, seq_index, position);
    }
    // Return the host block of a position; -1 if there is none.
    __device__ int32_t host_block(int32_t position) const {
        const int32_t index = position / block_size;
        if (index >= decode.num_host_blocks) return -1;
        return __ldg(decode.host_block_tables + seq_index * decode.host_block_table_stride + index);
    }
    __device__ int64_t host_row_id(int32_t position, int32_t block) const {
        return block < 0 ? -1 : static_cast<int64_t>(block) * decode.block_size + position % block_size;
    }
    __device__ bool wants(int32_t position) const { return position >= 0 && position < added.first; }
    __device__ bool is_valid(int32_t position) const { return position >= 0 && position < added.end; }
    // Return the expiry of a row that this step copies.
    __device__ int32_t first_expiry() const { return added.first + kUseBonus; }
    // Return the expiry of a hit. expiry: before this step.
    __device__ int32_t next_expiry(int32_t expiry) const {
        return added.first + min(max(expiry - added.first, 0) + kUseBonus, kMaxBonus);
    }
};

// A thread's share of `size` columns. Each warp has a run of columns, and handles kWarpSize of them in each round.
struct Share {
    int size;
    int rounds;
    int run_start;  // first column of the warp
    int first;  // first column of the thread

    __device__ explicit Share(int size)
        : size(size),
          rounds((size + kNumThreads - 1) / kNumThreads),
          run_start(warp_index() * rounds * kWarpSize),
          first(run_start + lane_index()) {}
    __device__ int at(int round) const { return first + round * kWarpSize; }
    __device__ bool has(int round) const { return round < rounds && at(round) < size; }
};

// Load a thread's share of a selection. selected: positions of the thread's columns; -1 beyond the columns.
template <int kColumnRounds>
__device__ __forceinline__ void load_selection(
    const int32_t* selected_positions, const Share& columns, int32_t (&selected)[kColumnRounds]
) {
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i)
        selected[i] = columns.has(i) ? __ldg(selected_positions + columns.at(i)) : -1;
}

// Compute the number of leading columns of each selection that contain all valid ones.
// selection_size: columns of a selection. num_valid: [max_query_len] in shared memory.
template <int kColumnRounds, bool kHasDrafts>
__device__ __forceinline__ void note_valid(
    const Request& request,
    const Share& columns,
    const int32_t (&selected)[kColumnRounds],
    const Divisor& selection_size,
    int32_t* num_valid
) {
    int32_t last_valid = 0;
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        const int column = columns.at(i);
        const bool valid = request.is_valid(selected[i]);
        if constexpr (!kHasDrafts) {
            if (valid) last_valid = column + 1;
            continue;
        }
        const int selection = column / selection_size, last = __shfl_sync(kAllLanes, selection, kWarpSize - 1);
        for (int of = __shfl_sync(kAllLanes, selection, 0); of <= last; ++of) {
            const int32_t count = valid && selection == of ? column % selection_size + 1 : 0;
            const int32_t most = __reduce_max_sync(kAllLanes, count);
            if (lane_index() == 0 && most > 0) atomicMax(num_valid + of, most);
        }
    }
    if constexpr (kHasDrafts) return;
    last_valid = __reduce_max_sync(kAllLanes, last_valid);
    if (lane_index() == 0 && last_valid > 0) atomicMax(num_valid, last_valid);
}

// The choice of victims: all slots with a higher age than `age`, and the first `num_of_age` slots with this age.
struct Cut {
    int32_t age;
    int32_t num_of_age;
    int32_t num_older_before;  // older slots in thread blocks before this one; `num_equal_before`: slots with this age
    int32_t num_equal_before;
};

// Values that the warps of a thread block share; other blocks read `hits`.
struct alignas(16) Shared {
    int32_t tallies[kNumWarps];
    int32_t aged[kNumWarps];  // slots of the warp's ages in all thread blocks
    int32_t aged_before[kNumWarps];  // those in thread blocks before this one
    int32_t older[kNumWarps];  // slots that are older than the cut
    int32_t equal[kNumWarps];  // slots that have the cut's age
    Cut cut;
    int32_t num_found;  // slots of the block with a wanted position
    int32_t num_valid[kMaxQueryLen];
    uint32_t hits[kMaxColumns / kWarpSize];  // [kNumWarps, column rounds] columns with a hit of this block, as bits
};

// Count the warp's hits and misses among the columns, each position once. lead_bits, hit_bits: rounds of the thread, as
// bits.
template <int kColumnRounds>
__device__ __forceinline__ void count_columns(uint32_t lead_bits, uint32_t hit_bits, int32_t* tallies) {
    int num_hits = 0, num_misses = 0;
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        num_hits += __popc(__ballot_sync(kAllLanes, (lead_bits & hit_bits) >> i & 1));
        num_misses += __popc(__ballot_sync(kAllLanes, (lead_bits & ~hit_bits) >> i & 1));
    }
    if (lane_index() == 0) tallies[warp_index()] = Tally::of(num_hits, num_misses).packed;
}

// Write the counts of one request. total: hits and misses of one layer. num_valid: [max_query_len] in shared memory.
__device__ __forceinline__ void report(
    int64_t* counts,
    int32_t num_layers,
    const Request& request,
    const Tally& total,
    const int32_t* num_valid,
    const Resolved& out
) {
    const int max_query_len = request.decode.max_query_len;
    if (threadIdx.x < max_query_len) {
        out.num_valid[request.batch_index * max_query_len + threadIdx.x] = num_valid[threadIdx.x];
    }
    if (threadIdx.x != 0) return;
    out.num_misses[request.batch_index] = total.misses();
    const auto own_counts = reinterpret_cast<unsigned long long*>(counts) + 2 * request.seq_index;
    atomicAdd(own_counts, static_cast<unsigned long long>(total.hits()) * num_layers);
    atomicAdd(own_counts + 1, static_cast<unsigned long long>(total.misses()) * num_layers);
}

}  // namespace hisparse
