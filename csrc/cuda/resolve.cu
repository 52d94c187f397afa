#include <algorithm>

#include "resolve.cuh"

namespace hisparse {
namespace {

constexpr int kRoundsAhead = 4;
constexpr int32_t kMaxKeptAges = 32768;  // slots whose ages are kept in shared memory, if there is room
constexpr int kNumAges = kMaxAge + 2;  // the last one is of empty rows
constexpr int32_t kClaim = 1 << 30;    // a last use below 0: the column that claims the row, less this
static_assert(kNumAges == kNumThreads, "one age per thread");

// Two counts, which one 64-bit sum adds.
struct Tally {
    int32_t first;
    int32_t second;

    __device__ uint64_t pack() const {
        return static_cast<uint64_t>(second) << 32 | static_cast<uint32_t>(first);
    }
    __device__ static Tally unpack(uint64_t packed) {
        return {static_cast<int32_t>(packed), static_cast<int32_t>(packed >> 32)};
    }
};

// Shared memory of one request: a hash table of the wanted columns, chained; its hits, misses and victims.
struct Scratch {
    static constexpr int kBucketsPerColumn = 4;  // at least, where there is room
    static constexpr int kEnd = -1;              // of a chain
    static constexpr int32_t kNone = INT32_MAX;  // no slot

    int32_t* heads;     // [2^bucket_bits] column whose position falls in the bucket, or kEnd
    int32_t* num_aged;  // [kNumAges] slots of each age that are no hits
    int32_t* selected;  // [columns]
    int32_t* chosen;    // [columns] slot of a hit, else kNone; with drafts, ~n of the n-th miss
    int32_t* missed;    // [columns] position of each miss, in the order of `top_k`
    int32_t* victims;   // [columns] flat hot row id that each takes
    uint32_t* hits;     // [slots / kWarpSize, rounded up] a bit per slot
    int16_t* next;      // [columns] next column of the chain, or kEnd
    uint16_t* ages;     // [num_kept] of slots that are no hits; those of later slots are found again
    int num_buckets;
    int32_t num_kept;

    __device__ Scratch(int32_t* memory, int num_columns, int bucket_bits, int32_t num_hot_rows, int32_t num_kept)
        : heads(memory),
          num_aged(memory + (1 << bucket_bits)),
          selected(num_aged + kNumAges),
          chosen(selected + num_columns),
          missed(chosen + num_columns),
          victims(missed + num_columns),
          hits(reinterpret_cast<uint32_t*>(victims + num_columns + (num_columns + 1) / 2)),
          next(reinterpret_cast<int16_t*>(victims + num_columns)),
          ages(reinterpret_cast<uint16_t*>(hits + (num_hot_rows + kWarpSize - 1) / kWarpSize)),
          num_buckets(1 << bucket_bits),
          num_kept(num_kept) {}

    // Of the largest table that fits into `max_bytes` with all but `ages`; 0 where none does.
    static int bucket_bits(int num_columns, int64_t num_hot_rows, size_t max_bytes) {
        int bits = 2;
        while (1 << bits < kBucketsPerColumn * num_columns) ++bits;
        while (bits > 0 && num_bytes(num_columns, bits, num_hot_rows) > max_bytes) --bits;
        return bits < 2 ? 0 : bits;  // `clear` writes four buckets at a time
    }
    // Without `ages`.
    static size_t num_bytes(int num_columns, int bucket_bits, int64_t num_hot_rows) {
        const size_t num_column_words = 4 * static_cast<size_t>(num_columns) + (num_columns + 1) / 2;
        const size_t num_slot_words = (num_hot_rows + kWarpSize - 1) / kWarpSize;
        return sizeof(int32_t) * ((size_t{1} << bucket_bits) + kNumAges + num_column_words + num_slot_words);
    }

    __device__ void clear(int32_t num_slots) const {
        const auto vectors = reinterpret_cast<int4*>(heads);
        for (int i = threadIdx.x; i < num_buckets / 4; i += kNumThreads) vectors[i] = {kEnd, kEnd, kEnd, kEnd};
        for (int i = threadIdx.x; i < (num_slots + kWarpSize - 1) / kWarpSize; i += kNumThreads) hits[i] = 0;
        num_aged[threadIdx.x] = 0;
    }
    __device__ int32_t* head(int32_t position) const {
        return heads + (position & (num_buckets - 1));
    }
    __device__ void insert(int32_t position, int column) const {
        next[column] = static_cast<int16_t>(atomicExch(head(position), column));
    }
    // Column that wants a position, the first of several, or kEnd. first: of the chain.
    template <bool kHasDrafts>
    __device__ int find(int32_t position, int first) const {
        int column = first;
        while (column != kEnd && selected[column] != position) column = next[column];
        if constexpr (kHasDrafts) {
            if (column == kEnd) return kEnd;
            for (int other = next[column]; other != kEnd; other = next[other]) {
                if (selected[other] == position) column = min(column, other);
            }
        }
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

// A hot row: its flat id, and its entry in the residency.
struct Place {
    int32_t row_id;
    int32_t entry;
};

// A request and where its rows are.
struct Request {
    const StepTables& tables;
    const HotRows& hot;
    const Divisor& rows_per_block;
    const Divisor& block_size;
    int batch_index;
    int32_t state_index;
    NewPositions added;

    // slot: within the request's hot rows.
    __device__ Place place(int32_t slot) const {
        const int32_t index = slot / rows_per_block, offset = slot - index * rows_per_block.divisor;
        const int32_t block = __ldg(tables.hot_tables + state_index * tables.hot_table_stride + index);
        return {
            static_cast<int32_t>(block * hot.block_stride_rows + offset), block * rows_per_block.divisor + offset
        };
    }
    __device__ int64_t host_row_id(int32_t position) const {
        return flat_host_row_id(tables, block_size, state_index, position);
    }
    __device__ bool wants(int32_t position) const { return position >= 0 && position < added.first; }
    __device__ bool is_valid(int32_t position) const { return position >= 0 && position < added.end; }
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
__device__ __forceinline__ void resolve_padding(const Resolved& out, int batch_index, int max_query_len) {
    for (int column = threadIdx.x; column < out.num_columns; column += kNumThreads) {
        out.hot_row_ids[static_cast<int64_t>(batch_index) * out.num_columns + column] = -1;
    }
    if (threadIdx.x < max_query_len) out.num_valid[batch_index * max_query_len + threadIdx.x] = 0;
    if (threadIdx.x == 0) out.num_misses[batch_index] = 0;
}

// selected: positions of the thread's columns; -1 beyond.
template <int kColumnRounds>
__device__ __forceinline__ void load_selection(
    const int32_t* top_k, const Share& columns, int32_t (&selected)[kColumnRounds]
) {
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) selected[i] = columns.has(i) ? __ldg(top_k + columns.at(i)) : -1;
}

// host_row_ids: of the thread's columns; -1 where none is wanted.
template <int kColumnRounds>
__device__ __forceinline__ void load_host_row_ids(
    const Request& request, const int32_t (&selected)[kColumnRounds], int64_t (&host_row_ids)[kColumnRounds]
) {
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        host_row_ids[i] = request.wants(selected[i]) ? request.host_row_id(selected[i]) : -1;
    }
}

// Note how many leading columns of each selection contain every valid one.
// top_k: columns of a selection. num_valid: [max_query_len] in shared memory.
template <int kColumnRounds, bool kHasDrafts>
__device__ __forceinline__ void note_valid(
    const Request& request,
    const Share& columns,
    const int32_t (&selected)[kColumnRounds],
    const Divisor& top_k,
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
        const int selection = column / top_k, last = __shfl_sync(kAllLanes, selection, kWarpSize - 1);
        for (int of = __shfl_sync(kAllLanes, selection, 0); of <= last; ++of) {
            const int32_t count = valid && selection == of ? column % top_k + 1 : 0;
            const int32_t most = __reduce_max_sync(kAllLanes, count);
            if (lane_index() == 0 && most > 0) atomicMax(num_valid + of, most);
        }
    }
    if constexpr (kHasDrafts) return;
    last_valid = __reduce_max_sync(kAllLanes, last_valid);
    if (lane_index() == 0 && last_valid > 0) atomicMax(num_valid, last_valid);
}

// Fill the hash table: each wanted position with its column.
template <int kColumnRounds>
__device__ __forceinline__ void map_columns(
    const Scratch& scratch, const Request& request, const Share& columns, const int32_t (&selected)[kColumnRounds]
) {
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        const int column = columns.at(i);
        if (!columns.has(i)) continue;
        scratch.selected[column] = selected[i];
        scratch.chosen[column] = Scratch::kNone;
        scratch.victims[column] = -1;
        if (request.wants(selected[i])) scratch.insert(selected[i], column);
    }
}

// leads: of each of the thread's columns the first one of the same position, or kEnd where none is wanted.
template <int kColumnRounds, bool kHasDrafts>
__device__ __forceinline__ void find_leads(
    const Scratch& scratch,
    const Request& request,
    const Share& columns,
    const int32_t (&selected)[kColumnRounds],
    int (&leads)[kColumnRounds]
) {
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        const bool wanted = request.wants(selected[i]);
        leads[i] = wanted ? columns.at(i) : Scratch::kEnd;
        if (kHasDrafts && wanted) leads[i] = scratch.find<kHasDrafts>(selected[i], *scratch.head(selected[i]));
    }
}

// Age of a row that is no hit: higher ages are evicted first.
__device__ __forceinline__ int32_t age_of(const Request& request, int32_t position, int32_t last_use) {
    return request.wants(position) ? max(0, min(request.added.first - last_use, kMaxAge)) : kNumAges - 1;
}

// The slots that a thread looks at together, so that their loads are under way at the same time; a warp looks at
// neighbouring ones.
struct HeldSlots {
    int32_t slots[kRoundsAhead];    // -1 where there is none
    int32_t entries[kRoundsAhead];  // in the residency
    int2 held[kRoundsAhead];        // what is there: of no column where there is no slot

    // first: round of the first one.
    __device__ __forceinline__ void load(
        const Residency& residency, const Request& request, int first, int32_t num_slots
    ) {
#pragma unroll
        for (int i = 0; i < kRoundsAhead; ++i) {
            const int32_t slot = (first + i) * kNumThreads + threadIdx.x;
            slots[i] = slot < num_slots ? slot : -1;
            entries[i] = slot < num_slots ? request.place(slot).entry : 0;
        }
#pragma unroll
        for (int i = 0; i < kRoundsAhead; ++i) {
            held[i] = slots[i] >= 0 ? residency.entries[entries[i]] : int2{-1, 0};
        }
    }
};

// Give the column of a hit its slot, which is used now, or note the slot's age. Of slots with the same position, the
// lowest is the hit; the others become empty. column: that wants what the slot holds, or kEnd. other: the column's slot
// so far, if there is a column.
__device__ __forceinline__ void note_slot(
    const Residency& residency,
    const Scratch& scratch,
    const Request& request,
    int32_t slot,
    int32_t entry,
    const int2& held,
    int column,
    int32_t other
) {
    const bool is_found = column != Scratch::kEnd, is_twice = is_found && other != Scratch::kNone;
    int32_t empty_or_aged = slot, age = kNumAges - 1;  // the slot that is no hit, if there is one
    if (is_found) residency.entries[entry].y = request.added.first;
    else age = age_of(request, held.x, held.y);
    if (is_twice) {
        empty_or_aged = max(slot, other);
        residency.entries[request.place(empty_or_aged).entry].x = -1;
    }
    if (slot >= 0 && (!is_found || is_twice)) {
        atomicAdd(scratch.num_aged + age, 1);
        if (empty_or_aged < scratch.num_kept) scratch.ages[empty_or_aged] = static_cast<uint16_t>(age);
    }
    // NOTE: by exclusive or, so that it does not matter who comes first.
    const bool is_hit = is_found && other > slot;
    const uint32_t hits = __ballot_sync(kAllLanes, is_hit);
    if (lane_index() == 0 && hits != 0) atomicXor(scratch.hits + slot / kWarpSize, hits);
    if (is_hit && is_twice) atomicXor(scratch.hits + other / kWarpSize, 1u << other % kWarpSize);
}

// Find the hits, and the ages of the others. ahead: of the first rounds.
template <bool kHasDrafts>
__device__ __forceinline__ void find_hits(
    const Residency& residency, const Scratch& scratch, const Request& request, int32_t num_slots, HeldSlots& ahead
) {
    const int num_rounds = (num_slots + kNumThreads - 1) / kNumThreads;
    for (int first = 0; first < num_rounds; first += kRoundsAhead) {
        const HeldSlots now = ahead;
        if (first + kRoundsAhead < num_rounds) ahead.load(residency, request, first + kRoundsAhead, num_slots);
        int columns[kRoundsAhead];
        int32_t others[kRoundsAhead];
#pragma unroll
        for (int i = 0; i < kRoundsAhead; ++i) {
            columns[i] = request.wants(now.held[i].x) ? *scratch.head(now.held[i].x) : Scratch::kEnd;
        }
#pragma unroll
        for (int i = 0; i < kRoundsAhead; ++i) {
            columns[i] = scratch.find<kHasDrafts>(now.held[i].x, columns[i]);
        }
#pragma unroll
        for (int i = 0; i < kRoundsAhead; ++i) {
            others[i] = columns[i] != Scratch::kEnd ? atomicMin(scratch.chosen + columns[i], now.slots[i]) : 0;
        }
#pragma unroll
        for (int i = 0; i < kRoundsAhead; ++i) {
            note_slot(
                residency, scratch, request, now.slots[i], now.entries[i], now.held[i], columns[i], others[i]
            );
        }
    }
}

// Count the warp's hits and misses among the columns, each position once. Returns the thread's rounds with a miss as
// bits. sum: {hits, misses}.
template <int kColumnRounds>
__device__ __forceinline__ uint32_t find_misses(
    const Scratch& scratch, const Share& columns, const int (&leads)[kColumnRounds], Tally& sum
) {
    uint32_t miss_bits = 0;
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        const bool leads_others = leads[i] == columns.at(i);
        const bool missed = leads_others && scratch.chosen[leads[i]] == Scratch::kNone;
        miss_bits |= missed << i;
        sum.first += __popc(__ballot_sync(kAllLanes, leads_others && !missed));
        sum.second += __popc(__ballot_sync(kAllLanes, missed));
    }
    return miss_bits;
}

// List the misses in the order of `top_k`.
template <int kColumnRounds, bool kHasDrafts>
__device__ __forceinline__ void list_misses(
    const Scratch& scratch,
    const Share& columns,
    const int32_t (&selected)[kColumnRounds],
    uint32_t miss_bits,
    int misses_before
) {
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        const bool missed = miss_bits >> i & 1;
        const int rank = take_rank(missed, lane_index(), misses_before);
        if (!missed) continue;
        scratch.missed[rank] = selected[i];
        if (kHasDrafts) scratch.chosen[columns.at(i)] = ~rank;
    }
}

// Which slots are victims: all of a higher age than `age`, and the first `num_of_age` of this one.
struct Cut {
    int32_t age;
    int32_t num_of_age;
};

// Find the cut for a number of victims. cut, warp_sums: in shared memory; written before the next barrier.
__device__ __forceinline__ void find_cut(const Scratch& scratch, int32_t num_victims, uint64_t* warp_sums, Cut* cut) {
    const int age = kNumAges - 1 - threadIdx.x, count = scratch.num_aged[age];
    int older = count;  // the warp's so far, then all
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const int other = __shfl_up_sync(kAllLanes, older, distance);
        if (lane_index() >= distance) older += other;
    }
    if (lane_index() == kWarpSize - 1) warp_sums[warp_index()] = older;
    __syncthreads();
    Tally before, total;
    scan_warps(warp_sums, warp_index(), lane_index(), before, total);
    older += before.first - count;
    if (older < num_victims && num_victims <= older + count) *cut = {age, num_victims - older};
}

// Ages of a few rounds of a warp's slots; -1 for a hit, and for no slot.
__device__ __forceinline__ void load_ages(
    const Residency& residency,
    const Scratch& scratch,
    const Request& request,
    const Share& slots,
    int first,
    int32_t (&ages)[kRoundsAhead]
) {
#pragma unroll
    for (int i = 0; i < kRoundsAhead; ++i) {
        const int32_t slot = slots.at(first + i);
        const bool exists = slots.has(first + i), is_kept = slot < scratch.num_kept;
        const uint32_t hits = exists ? scratch.hits[slot / kWarpSize] : kAllLanes;
        ages[i] = scratch.ages[exists && is_kept ? slot : 0];
        if (exists && !is_kept) {
            const int2 held = residency.entries[request.place(slot).entry];
            ages[i] = age_of(request, held.x, held.y);
        }
        if (hits >> lane_index() & 1) ages[i] = -1;
    }
}

// Put the misses into their victims, in the order of their slots.
__device__ __forceinline__ void fill_victims(
    const Residency& residency,
    const Scratch& scratch,
    const Request& request,
    int32_t num_slots,
    const Cut& cut,
    uint64_t* warp_sums
) {
    const Share slots(num_slots);
    Tally sum{0, 0}, before, total;
    int32_t ages[kRoundsAhead];
    for (int first = 0; first < slots.rounds; first += kRoundsAhead) {
        load_ages(residency, scratch, request, slots, first, ages);
#pragma unroll
        for (int i = 0; i < kRoundsAhead; ++i) {
            sum.first += __popc(__ballot_sync(kAllLanes, ages[i] > cut.age));
            sum.second += __popc(__ballot_sync(kAllLanes, ages[i] == cut.age));
        }
    }
    if (lane_index() == 0) warp_sums[warp_index()] = sum.pack();
    __syncthreads();
    scan_warps(warp_sums, warp_index(), lane_index(), before, total);
    int victims_before = before.first + min(before.second, cut.num_of_age);
    for (int first = 0; first < slots.rounds; first += kRoundsAhead) {
        if (slots.rounds > kRoundsAhead) load_ages(residency, scratch, request, slots, first, ages);
        int ranks[kRoundsAhead];  // -1 where a slot is no victim
        Place places[kRoundsAhead];
#pragma unroll
        for (int i = 0; i < kRoundsAhead; ++i) {
            const int equal_rank = take_rank(ages[i] == cut.age, lane_index(), before.second);
            const bool is_victim = ages[i] > cut.age || (ages[i] == cut.age && equal_rank < cut.num_of_age);
            const int rank = take_rank(is_victim, lane_index(), victims_before);
            ranks[i] = is_victim ? rank : -1;
            if (is_victim) places[i] = request.place(slots.at(first + i));
        }
#pragma unroll
        for (int i = 0; i < kRoundsAhead; ++i) {
            if (ranks[i] < 0) continue;
            residency.entries[places[i].entry] = {scratch.missed[ranks[i]], request.added.first};
            scratch.victims[ranks[i]] = places[i].row_id;
        }
    }
}

// Write where each selected row is, and the misses, both in the order of `top_k`.
template <int kColumnRounds, bool kHasDrafts>
__device__ __forceinline__ void write_columns(
    const Resolved& out,
    const Scratch& scratch,
    const Request& request,
    const Share& columns,
    const int32_t (&selected)[kColumnRounds],
    const int (&leads)[kColumnRounds],
    const int64_t (&host_row_ids)[kColumnRounds],
    uint32_t miss_bits,
    int misses_before
) {
    const int64_t first_out = static_cast<int64_t>(request.batch_index) * out.num_columns;
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        const bool missed = miss_bits >> i & 1;
        const int rank = take_rank(missed, lane_index(), misses_before);
        if (!columns.has(i)) continue;
        int32_t hot_row_id = -1, slot = -1;
        if (missed) hot_row_id = scratch.victims[rank];
        else if (leads[i] != Scratch::kEnd) slot = scratch.chosen[leads[i]];
        else if (request.is_valid(selected[i])) slot = request.added.slot(selected[i]);
        if (slot >= 0) hot_row_id = request.place(slot).row_id;
        else if (kHasDrafts && !missed && leads[i] != Scratch::kEnd) hot_row_id = scratch.victims[~slot];
        write_column(out, first_out + columns.at(i), first_out + rank, hot_row_id, missed, host_row_ids[i]);
    }
}

// What the warps of a thread block tell each other.
struct alignas(16) Shared {
    uint64_t warp_sums[3][kNumWarps];
    Cut cut;
    int32_t num_valid[kMaxQueryLen];
};

// Counts of one request. total: {hits, misses} of one layer. num_valid: [max_query_len] in shared memory.
__device__ __forceinline__ void report(
    int64_t* counts,
    int32_t num_layers,
    const Request& request,
    const Tally& total,
    const int32_t* num_valid,
    const Resolved& out
) {
    const int max_query_len = request.tables.max_query_len;
    if (threadIdx.x < max_query_len) {
        out.num_valid[request.batch_index * max_query_len + threadIdx.x] = num_valid[threadIdx.x];
    }
    if (threadIdx.x != 0) return;
    out.num_misses[request.batch_index] = total.second;
    const auto own_counts = reinterpret_cast<unsigned long long*>(counts) + 2 * request.state_index;
    atomicAdd(own_counts, static_cast<unsigned long long>(total.first) * num_layers);
    atomicAdd(own_counts + 1, static_cast<unsigned long long>(total.second) * num_layers);
}

// Find the place of each selected position of a sequence that fits. Returns the thread's rounds with a hit as bits.
template <int kColumnRounds>
__device__ __forceinline__ uint32_t find_fitting_hits(
    const Residency& residency,
    const Request& request,
    const int32_t (&selected)[kColumnRounds],
    Place (&places)[kColumnRounds]
) {
    uint32_t hit_bits = 0;
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        places[i] = request.is_valid(selected[i]) ? request.place(selected[i]) : Place{-1, -1};
        const bool hit = request.wants(selected[i]) && residency.entries[places[i].entry].x == selected[i];
        hit_bits |= hit << i;
    }
    return hit_bits;
}

// Which of the thread's columns are wanted, as bits; of columns with the same position only the first.
template <int kColumnRounds, bool kHasDrafts>
__device__ __forceinline__ uint32_t find_fitting_leads(
    const Residency& residency,
    const Request& request,
    const Share& columns,
    const int32_t (&selected)[kColumnRounds],
    const Place (&places)[kColumnRounds]
) {
    uint32_t lead_bits = 0;
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        const bool wanted = request.wants(selected[i]);
        lead_bits |= wanted << i;
        if (kHasDrafts && wanted) atomicMin(&residency.entries[places[i].entry].y, columns.at(i) - kClaim);
    }
    if constexpr (!kHasDrafts) return lead_bits;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        if (!(lead_bits >> i & 1)) continue;
        // NOTE: past the L1 cache, which atomics do not write.
        const bool leads = __ldcg(&residency.entries[places[i].entry].y) == columns.at(i) - kClaim;
        if (!leads) lead_bits &= ~(1u << i);
    }
    return lead_bits;
}

// Write where each selected row is, and the misses, both in the order of `top_k`; a miss takes the slot of its number.
template <int kColumnRounds>
__device__ __forceinline__ void write_fitting_columns(
    const Resolved& out,
    const Residency& residency,
    const Request& request,
    const Share& columns,
    const int32_t (&selected)[kColumnRounds],
    const Place (&places)[kColumnRounds],
    uint32_t miss_bits,
    int misses_before
) {
    const int64_t first_out = static_cast<int64_t>(request.batch_index) * out.num_columns;
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        const int column = columns.at(i);
        const bool missed = miss_bits >> i & 1;
        const int rank = take_rank(missed, lane_index(), misses_before);
        if (!columns.has(i)) continue;
        const int64_t host_row_id = missed ? request.host_row_id(selected[i]) : -1;
        write_column(out, first_out + column, first_out + rank, places[i].row_id, missed, host_row_id);
        if (missed) residency.entries[places[i].entry].x = selected[i];
        if (places[i].entry >= 0) residency.entries[places[i].entry].y = request.added.first;
    }
}

// A sequence that fits: position p is hot if slot p holds it. Nothing is searched for, nothing is evicted.
template <int kColumnRounds, bool kHasDrafts>
__device__ __forceinline__ void resolve_fitting(
    const Residency& residency,
    const Request& request,
    int64_t* counts,
    const Resolved& out,
    const Share& columns,
    const int32_t (&selected)[kColumnRounds],
    const Divisor& top_k,
    Shared& shared
) {
    Tally sum{0, 0}, before, total;
    Place places[kColumnRounds];
    const uint32_t hit_bits = find_fitting_hits(residency, request, selected, places);
    const uint32_t lead_bits =
        find_fitting_leads<kColumnRounds, kHasDrafts>(residency, request, columns, selected, places);
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        sum.first += __popc(__ballot_sync(kAllLanes, (lead_bits & hit_bits) >> i & 1));
        sum.second += __popc(__ballot_sync(kAllLanes, (lead_bits & ~hit_bits) >> i & 1));
    }
    if (lane_index() == 0) shared.warp_sums[0][warp_index()] = sum.pack();
    __syncthreads();
    note_valid<kColumnRounds, kHasDrafts>(request, columns, selected, top_k, shared.num_valid);
    scan_warps(shared.warp_sums[0], warp_index(), lane_index(), before, total);
    const uint32_t miss_bits = lead_bits & ~hit_bits;
    write_fitting_columns(out, residency, request, columns, selected, places, miss_bits, before.second);
    __syncthreads();
    const int32_t position = request.added.first + threadIdx.x;
    if (position < request.added.end) {
        residency.entries[request.place(position).entry] = {position, request.added.first};
    }
    report(counts, residency.num_layers, request, total, shared.num_valid, out);
}

// A sequence that has outgrown its buffer: hits by hash table, victims by age.
template <int kColumnRounds, bool kHasDrafts>
__device__ __forceinline__ void resolve_evicting(
    const Residency& residency,
    const Request& request,
    int64_t* counts,
    const Resolved& out,
    const Share& columns,
    const int32_t (&selected)[kColumnRounds],
    const Divisor& top_k,
    const Scratch& scratch,
    Shared& shared
) {
    const int32_t num_slots = request.added.first_slot;
    HeldSlots ahead;
    ahead.load(residency, request, 0, num_slots);
    scratch.clear(num_slots);
    __syncthreads();

    map_columns(scratch, request, columns, selected);
    int64_t host_row_ids[kColumnRounds];
    load_host_row_ids(request, selected, host_row_ids);
    __syncthreads();
    note_valid<kColumnRounds, kHasDrafts>(request, columns, selected, top_k, shared.num_valid);

    find_hits<kHasDrafts>(residency, scratch, request, num_slots, ahead);
    int leads[kColumnRounds];
    find_leads<kColumnRounds, kHasDrafts>(scratch, request, columns, selected, leads);
    __syncthreads();

    Tally sum{0, 0}, before, total;
    const uint32_t miss_bits = find_misses(scratch, columns, leads, sum);
    if (lane_index() == 0) shared.warp_sums[0][warp_index()] = sum.pack();
    __syncthreads();
    scan_warps(shared.warp_sums[0], warp_index(), lane_index(), before, total);

    if (total.second > 0) {
        list_misses<kColumnRounds, kHasDrafts>(scratch, columns, selected, miss_bits, before.second);
        find_cut(scratch, total.second, shared.warp_sums[1], &shared.cut);
        __syncthreads();
        fill_victims(residency, scratch, request, num_slots, shared.cut, shared.warp_sums[2]);
        __syncthreads();
    }
    write_columns<kColumnRounds, kHasDrafts>(
        out, scratch, request, columns, selected, leads, host_row_ids, miss_bits, before.second
    );
    // The new rows take the places of what the reserved slots held.
    if (threadIdx.x < request.tables.max_query_len) {
        residency.entries[request.place(num_slots + threadIdx.x).entry].x = -1;
    }
    report(counts, residency.num_layers, request, total, shared.num_valid, out);
}

// One thread block per request. Each warp takes a run of columns and, where victims are chosen, a run of slots,
// kWarpSize at a time, so that ballots give every order: nothing is sorted.
template <int kColumnRounds, bool kHasDrafts>
__global__ void __launch_bounds__(kNumThreads, 1) resolve_kernel(
    const Residency residency,
    const StepTables tables,
    const int32_t* __restrict__ columns_of_requests,  // [batch, out.num_columns], requests column_stride elements apart
    const int64_t column_stride,
    const HotRows hot,
    int64_t* counts,  // [num_states, 2]
    const Resolved out,
    const Divisor rows_per_block,
    const Divisor block_size,
    const Divisor top_k,
    const int bucket_bits,
    const int32_t num_kept_ages
) {
    extern __shared__ int32_t memory[];
    __shared__ Shared shared;
    launch_dependents();
    const int batch_index = blockIdx.x;
    const int32_t max_hot_rows = tables.num_hot_blocks * rows_per_block.divisor;
    const Scratch scratch(memory, out.num_columns, bucket_bits, max_hot_rows, num_kept_ages);
    const Share columns(out.num_columns);

    int32_t selected[kColumnRounds];
    load_selection(columns_of_requests + batch_index * column_stride, columns, selected);
    if (threadIdx.x < kMaxQueryLen) shared.num_valid[threadIdx.x] = 0;
    if (threadIdx.x == 0) shared.cut = {-1, 0};
    const int32_t state_index = find_state(tables, batch_index);
    if (state_index < 0) return resolve_padding(out, batch_index, tables.max_query_len);

    const NewPositions added(tables, batch_index, tables.num_hot_rows[state_index]);
    const Request request{tables, hot, rows_per_block, block_size, batch_index, state_index, added};
    if (added.fits) {
        return resolve_fitting<kColumnRounds, kHasDrafts>(
            residency, request, counts, out, columns, selected, top_k, shared
        );
    }
    resolve_evicting<kColumnRounds, kHasDrafts>(
        residency, request, counts, out, columns, selected, top_k, scratch, shared
    );
}

// Dynamic shared memory that a thread block of the current device can have.
cudaError_t max_shared_bytes(int* result) {
    int device = 0;
    if (const cudaError_t error = cudaGetDevice(&device)) return error;
    const cudaError_t error = cudaDeviceGetAttribute(result, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    *result -= static_cast<int>(sizeof(Shared));
    return error;
}

using Kernel = decltype(&resolve_kernel<2, false>);

// The smallest kernel whose rounds cover the columns of a request; null where none does.
Kernel choose_kernel(int num_columns, int max_query_len) {
    if (max_query_len < 1 || max_query_len > kMaxQueryLen || num_columns % max_query_len != 0) return nullptr;
    if (num_columns > (max_query_len > 1 ? kMaxColumns : kMaxTopK)) return nullptr;
    const bool has_drafts = max_query_len > 1;
    if (num_columns <= 2 * kNumThreads) return has_drafts ? resolve_kernel<2, true> : resolve_kernel<2, false>;
    if (num_columns <= 4 * kNumThreads) return has_drafts ? resolve_kernel<4, true> : resolve_kernel<4, false>;
    return resolve_kernel<kMaxColumns / kNumThreads, true>;
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
    const int num_columns = out->num_columns;
    const Kernel kernel = choose_kernel(num_columns, tables->max_query_len);
    const int64_t num_hot_rows = static_cast<int64_t>(tables->num_hot_blocks) * hot->rows_per_block;
    if (kernel == nullptr || num_hot_rows > kMaxHotRows) return cudaErrorInvalidValue;
    int max_bytes = 0;
    if (const cudaError_t error = max_shared_bytes(&max_bytes)) return error;
    const int bucket_bits = Scratch::bucket_bits(num_columns, num_hot_rows, max_bytes - sizeof(uint16_t));
    if (bucket_bits == 0) return cudaErrorInvalidValue;
    const size_t num_bytes = Scratch::num_bytes(num_columns, bucket_bits, num_hot_rows);
    const auto room = static_cast<int64_t>((max_bytes - num_bytes) / sizeof(uint16_t));
    const auto num_kept_ages = static_cast<int32_t>(std::min<int64_t>({num_hot_rows, room, kMaxKeptAges}));
    // NOTE: the limit is always the same: a graph keeps its launches, but reads this attribute of the kernel.
    const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
    if (const cudaError_t error = cudaFuncSetAttribute(kernel, attribute, max_bytes)) return error;
    const Divisor rows_per_block(hot->rows_per_block), block_size(tables->block_size);
    const Divisor selection_size(num_columns / tables->max_query_len);
    kernel<<<tables->batch, kNumThreads, num_bytes + num_kept_ages * sizeof(uint16_t), stream>>>(
        *residency, *tables, top_k, top_k_stride, *hot, counts, *out, rows_per_block, block_size, selection_size,
        bucket_bits, num_kept_ages
    );
    return cudaGetLastError();
}
