// Resolution of requests that do not fit: they have more tokens than slots.
#pragma once

#include "cluster.cuh"
#include "resolve_request.cuh"
#include "resolve_scratch.cuh"

namespace hisparse {

constexpr int kRoundsAhead = 4;

// Load the host blocks of the thread's misses. host_blocks: -1 for other columns.
template <int kColumnRounds>
__device__ __forceinline__ void load_host_blocks(
    const Request& request,
    const int32_t (&selected)[kColumnRounds],
    uint32_t miss_bits,
    int32_t (&host_blocks)[kColumnRounds]
) {
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        host_blocks[i] = miss_bits >> i & 1 ? request.host_block(selected[i]) : -1;
    }
}

// Fill the hash table with the column of each wanted position.
template <int kColumnRounds>
__device__ __forceinline__ void map_columns(
    const Scratch<kColumnRounds>& scratch,
    const Request& request,
    const Share& columns,
    const int32_t (&selected)[kColumnRounds]
) {
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        const int column = columns.at(i);
        if (!columns.has(i)) continue;
        scratch.chosen[column] = scratch.kNone;
        scratch.victims[column] = -1;
        if (request.wants(selected[i])) scratch.insert(selected[i], column);
    }
}

// The entry in the hash table of each of a thread's columns.
template <int kColumnRounds>
struct Found {
    int32_t columns[kColumnRounds];  // column that represents all of the same position; below 0: not wanted
    uint32_t lead_bits;              // rounds whose column is the lowest of the same position, as bits
};

template <int kColumnRounds, bool kHasDrafts>
__device__ __forceinline__ Found<kColumnRounds> find_columns(
    const Scratch<kColumnRounds>& scratch,
    const Request& request,
    const Share& columns,
    const int32_t (&selected)[kColumnRounds]
) {
    Found<kColumnRounds> found;
    found.lead_bits = 0;
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        const bool wanted = request.wants(selected[i]);
        int32_t column = columns.at(i), lowest = column;
        if (kHasDrafts && wanted) {
            column = scratch.find(selected[i]);
            lowest = scratch.find_lowest(selected[i], column);
        }
        found.columns[i] = wanted ? column : scratch.kEnd;
        found.lead_bits |= (wanted && lowest == columns.at(i)) << i;
    }
    return found;
}

// Slots of a thread block, [first, end). The blocks of a cluster share a request's slots, in order.
struct SlotRun {
    int32_t first;
    int32_t end;

    template <bool kIsCluster>
    __device__ SlotRun(int32_t num_slots, const Cluster<kIsCluster>& cluster) : first(0), end(num_slots) {
        if constexpr (!kIsCluster) return;
        const int32_t part = kSlotsPerLoad * cluster.size;
        const int32_t size = (num_slots + part - 1) / part * kSlotsPerLoad;
        first = min(cluster.rank * size, num_slots);
        end = min(first + size, num_slots);
    }
    __device__ int32_t size() const { return end - first; }
};

// Return the age of a row that is not a hit: the time since its expiry plus kMaxBonus. Higher ages are evicted first.
__device__ __forceinline__ int32_t age_of(const Request& request, int32_t position, int32_t expiry) {
    // NOTE: kMaxBonus is added last, because this takes fewer registers.
    const int32_t overdue = max(-kMaxBonus, min(request.added.first - expiry, kMaxAge - kMaxBonus));
    return request.wants(position) ? overdue + kMaxBonus : kNumAges - 1;
}

// Slots that a thread reads together, so that their loads are in flight at the same time. Lanes of a warp read
// neighbouring slots.
struct HeldSlots {
    int32_t entries[kRoundsAhead];  // entries of the slots in the residency
    int2 held[kRoundsAhead];        // contents of these entries

    // first: slot of the first round. end: end of the slots.
    // NOTE: beyond the end, a slot is loaded again, because without a branch all loads begin before the first wait.
    __device__ __forceinline__ void load(
        const Residency& residency, const Request& request, int32_t first, int32_t end
    ) {
#pragma unroll
        for (int i = 0; i < kRoundsAhead; ++i) {
            entries[i] = request.place(max(min(first + i * kNumThreads, end - 1), 0)).entry;
        }
#pragma unroll
        for (int i = 0; i < kRoundsAhead; ++i) held[i] = residency.entries[entries[i]];
    }
};

// Find the hits among the run's slots and set their expiry; note the ages of the other slots. If several slots hold the
// same position, the lowest is chosen. ahead: slots of the first rounds. Returns the number of the thread's slots that
// hold a wanted position.
template <int kColumnRounds>
__device__ __forceinline__ int find_hits(
    const Residency& residency,
    const Scratch<kColumnRounds>& scratch,
    const Request& request,
    const SlotRun& run,
    HeldSlots& ahead
) {
    constexpr int32_t kStep = kRoundsAhead * kNumThreads;
    int num_found = 0;
    for (int32_t start = run.first; start < run.end; start += kStep) {
        const int32_t first = start + threadIdx.x;
        const HeldSlots now = ahead;
        if (start + kStep < run.end) ahead.load(residency, request, first + kStep, run.end);
        int32_t columns[kRoundsAhead];
#pragma unroll
        for (int i = 0; i < kRoundsAhead; ++i) {
            const int32_t position = now.held[i].x;
            const int32_t difference = scratch.compare(*scratch.head(position), position);
            columns[i] = request.wants(position) && first + i * kNumThreads < run.end ? difference : scratch.kEnd;
        }
        bool goes_on = false;
        do {
            goes_on = false;
#pragma unroll
            for (int i = 0; i < kRoundsAhead; ++i) {
                if (columns[i] >= kMaxColumns) columns[i] = scratch.compare_next(columns[i], now.held[i].x);
                goes_on |= columns[i] >= kMaxColumns;
            }
        } while (goes_on);
#pragma unroll
        for (int i = 0; i < kRoundsAhead; ++i) {
            const int32_t slot = first + i * kNumThreads;
            const int32_t age = age_of(request, now.held[i].x, now.held[i].y);
            if (columns[i] >= 0) {
                ++num_found;
                atomicMin(scratch.chosen + columns[i], slot);
                residency.entries[now.entries[i]].y = request.next_expiry(now.held[i].y);
            } else if (slot < run.end) {
                scratch.note_age(slot - run.first, age);
            }
        }
    }
    return num_found;
}

// Return the rounds of the thread whose position is a hit of this thread block, as bits.
template <int kColumnRounds>
__device__ __forceinline__ uint32_t
find_own_hits(const Scratch<kColumnRounds>& scratch, const Found<kColumnRounds>& found) {
    uint32_t hit_bits = 0;
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        const bool is_hit = found.columns[i] >= 0 && scratch.chosen[found.columns[i]] != scratch.kNone;
        hit_bits |= is_hit << i;
    }
    return hit_bits;
}

// Hits of a thread's rounds, as bits.
struct Hits {
    uint32_t of_any;  // hits of any thread block
    uint32_t of_lower;  // hits of thread blocks before this one
    int32_t num_slots;  // slots of all blocks that hold a wanted position; more than hits if several hold the same one
};

// Collect the hits of all thread blocks. own: hits of this one. Counts of other blocks from before the call can be read
// after it.
template <int kColumnRounds, bool kIsCluster>
__device__ __forceinline__ Hits share_hits(const Cluster<kIsCluster>& cluster, Shared& shared, uint32_t own) {
    if constexpr (!kIsCluster) return {own, 0, shared.num_found};
    Hits hits{0, 0, 0};
    uint32_t* const words = shared.hits + warp_index() * kColumnRounds;
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        const uint32_t word = __ballot_sync(kAllLanes, own >> i & 1);
        if (lane_index() == 0) words[i] = word;
    }
    cluster.sync();
    int32_t found[kMaxClusterSize];
    uint32_t of_blocks[kColumnRounds][kMaxClusterSize];
    cluster.read(&shared.num_found, found);
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) cluster.read(words + i, of_blocks[i]);
#pragma unroll
    for (int rank = 0; rank < kMaxClusterSize; ++rank) {
        if (rank == cluster.rank) hits.of_lower = hits.of_any;
        hits.num_slots += found[rank];
#pragma unroll
        for (int i = 0; i < kColumnRounds; ++i) hits.of_any |= (of_blocks[i][rank] >> lane_index() & 1) << i;
    }
    return hits;
}

// Empty each slot whose position a lower slot holds, too, which is rare. own: hits of this thread block. Returns its
// remaining hits.
template <int kColumnRounds, bool kIsCluster>
__device__ __forceinline__ uint32_t empty_doubles(
    const Cluster<kIsCluster>& cluster,
    const Residency& residency,
    const Scratch<kColumnRounds>& scratch,
    const Request& request,
    const SlotRun& run,
    const Found<kColumnRounds>& found,
    const Hits& hits,
    uint32_t own
) {
    cluster.sync();  // other blocks no longer read the values that change now
    const uint32_t lost = own & hits.of_lower;
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        if (lost & found.lead_bits & 1u << i) scratch.chosen[found.columns[i]] = scratch.kNone;
    }
    __syncthreads();
#pragma unroll 1
    for (int32_t slot = run.first + threadIdx.x; slot < run.end; slot += kNumThreads) {
        int2& held = residency.entries[request.place(slot).entry];
        const int32_t column = request.wants(held.x) ? scratch.find(held.x) : scratch.kEnd;
        if (column < 0 || scratch.chosen[column] == slot) continue;
        held.x = -1;
        scratch.note_age(slot - run.first, kNumAges - 1);
    }
    __syncthreads();
    return own & ~lost;
}

// The slots of one age that are not hits. Each thread has one age, the first thread the highest.
struct Aged {
    int32_t age;
    int32_t count;
    int32_t count_before;  // slots in thread blocks before this one
};

template <int kColumnRounds, bool kIsCluster>
__device__ __forceinline__ Aged
count_aged(const Cluster<kIsCluster>& cluster, const Scratch<kColumnRounds>& scratch, Shared& shared) {
    Aged aged{kNumAges - 1 - static_cast<int32_t>(threadIdx.x), 0, 0};
    int32_t of_blocks[kMaxClusterSize] = {scratch.num_aged[aged.age]};
    if constexpr (kIsCluster) cluster.read(scratch.num_aged + aged.age, of_blocks);
#pragma unroll
    for (int rank = 0; rank < kMaxClusterSize; ++rank) {
        if (rank == cluster.rank) aged.count_before = aged.count;
        aged.count += of_blocks[rank];
    }
    const int32_t sum = __reduce_add_sync(kAllLanes, aged.count);
    const int32_t sum_of_before = kIsCluster ? __reduce_add_sync(kAllLanes, aged.count_before) : 0;
    if (lane_index() == 0) shared.aged[warp_index()] = sum;
    if (kIsCluster && lane_index() == 0) shared.aged_before[warp_index()] = sum_of_before;
    return aged;
}

// Number the misses in the order of the selected positions. misses_before: misses of earlier warps.
template <int kColumnRounds>
__device__ __forceinline__ void number_misses(
    const Scratch<kColumnRounds>& scratch, const Found<kColumnRounds>& found, uint32_t miss_bits, int misses_before
) {
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        const bool missed = miss_bits >> i & 1;
        const int rank = take_rank(missed, lane_index(), misses_before);
        if (missed) scratch.chosen[found.columns[i]] = ~rank;
    }
}

// Find the cut for a number of victims, and write it before the next barrier.
template <bool kIsCluster>
__device__ __forceinline__ void find_cut(const Aged& aged, int32_t num_victims, Shared& shared) {
    int32_t older = sum_before(shared.aged);
    if (num_victims <= older || num_victims > older + shared.aged[warp_index()]) return;
    older += sum_up_to(aged.count) - aged.count;
    const bool is_cut = older < num_victims && num_victims <= older + aged.count;
    int32_t older_before = 0;
    if constexpr (kIsCluster) {
        const int lane = __ffs(__ballot_sync(kAllLanes, is_cut)) - 1;
        older_before = sum_before(shared.aged_before);
        older_before += __reduce_add_sync(kAllLanes, lane_index() < lane ? aged.count_before : 0);
    }
    if (is_cut) shared.cut = {aged.age, num_victims - older, older_before, aged.count_before};
}

// Return the age of a slot's row plus one; 0 for a hit.
template <int kColumnRounds>
__device__ __forceinline__ uint32_t
find_age(const Scratch<kColumnRounds>& scratch, const Request& request, int32_t slot, const int2& held) {
    const int32_t column = request.wants(held.x) ? scratch.find(held.x) : scratch.kEnd;
    return column >= 0 && scratch.chosen[column] == slot ? 0 : age_of(request, held.x, held.y) + 1;
}

// Return the ages of kSlotsPerLoad slots in the form of `Scratch`, two in each word; 0 beyond the run. first: first
// slot, counted from the start of the run.
template <int kColumnRounds>
__device__ __forceinline__ uint4 load_ages(
    const Residency& residency,
    const Scratch<kColumnRounds>& scratch,
    const Request& request,
    const SlotRun& run,
    int32_t first
) {
    if (first >= run.size()) return {0, 0, 0, 0};
    if (first < scratch.num_kept) return reinterpret_cast<const uint4*>(scratch.ages)[first / kSlotsPerLoad];
    uint32_t words[kSlotsPerLoad / 2];
#pragma unroll
    for (int i = 0; i < kSlotsPerLoad / 2; ++i) {
        const int32_t slot = run.first + first + 2 * i;
        words[i] = 0;
        if (slot < run.end) {
            words[i] = find_age(scratch, request, slot, residency.entries[request.place(slot).entry]);
        }
        if (slot + 1 < run.end) {
            words[i] |= find_age(scratch, request, slot + 1, residency.entries[request.place(slot + 1).entry]) << 16;
        }
    }
    return {words[0], words[1], words[2], words[3]};
}

// Return the slots that have at least a given age, as bits. least: this age plus one.
__device__ __forceinline__ uint32_t find_aged(const uint4& ages, int32_t least) {
    // The bit above an age's bits is set if this addition carries into it.
    const uint32_t added = (0x8000 - least) * 0x10001u;
    const uint32_t low = __byte_perm(ages.x + added, ages.y + added, 0x7531) & 0x80808080;
    const uint32_t high = __byte_perm(ages.z + added, ages.w + added, 0x7531) & 0x80808080;
    return (low >> 7 | high >> 3) * 0x01020408u >> 24;  // bits 0 and 4 of each byte, side by side
}

// Slots that may be victims, as bits.
struct Candidates {
    uint32_t older;  // older than the cut's age; `equal`: of this age
    uint32_t equal;

    __device__ __forceinline__ Candidates(const uint4& ages, const Cut& cut)
        : older(find_aged(ages, cut.age + 2)), equal(find_aged(ages, cut.age + 1) & ~older) {}
};

// Choose victims in the order of their slots. A warp handles a run of slots, a thread kSlotsPerLoad of them at a time.
template <int kColumnRounds>
__device__ __forceinline__ void choose_victims(
    const Residency& residency,
    const Scratch<kColumnRounds>& scratch,
    const Request& request,
    const SlotRun& run,
    Shared& shared
) {
    constexpr int kStep = kWarpSize * kSlotsPerLoad;
    const Cut cut = shared.cut;
    const int rounds = (run.size() + kNumWarps * kStep - 1) / (kNumWarps * kStep);
    const int32_t start = warp_index() * rounds * kStep + lane_index() * kSlotsPerLoad;
    int32_t num_older = 0, num_equal = 0;
    for (int round = 0; round < rounds; ++round) {
        const Candidates found(load_ages(residency, scratch, request, run, start + round * kStep), cut);
        num_older += __popc(found.older);
        num_equal += __popc(found.equal);
    }
    num_older = __reduce_add_sync(kAllLanes, num_older);
    num_equal = __reduce_add_sync(kAllLanes, num_equal);
    if (lane_index() == 0) shared.older[warp_index()] = num_older;
    if (lane_index() == 0) shared.equal[warp_index()] = num_equal;
    __syncthreads();
    if (num_older + num_equal == 0) return;
    int32_t older_before = cut.num_older_before + sum_before(shared.older);
    int32_t equal_before = cut.num_equal_before + sum_before(shared.equal);
    for (int round = 0; round < rounds; ++round) {
        const int32_t first = start + round * kStep;
        const Candidates found(load_ages(residency, scratch, request, run, first), cut);
        const int32_t counts = __popc(found.older) | __popc(found.equal) << 16, sums = sum_up_to(counts);
        int32_t older = older_before + ((sums - counts) & 0xffff), equal = equal_before + ((sums - counts) >> 16);
        for (uint32_t left = found.older | found.equal; left != 0; left &= left - 1) {
            const bool is_older = (left & -left & found.older) != 0;
            const int32_t rank = older + min(equal, cut.num_of_age);
            if (is_older || equal < cut.num_of_age) scratch.victims[rank] = run.first + first + __ffs(left) - 1;
            if (is_older) ++older;
            else ++equal;
        }
        const int32_t total = __shfl_sync(kAllLanes, sums, kWarpSize - 1);
        older_before += total & 0xffff;
        equal_before += total >> 16;
    }
}

// The place of one of a thread block's columns.
struct Target {
    Place place;
    int32_t miss;  // number of the miss; below 0 if the column is not a miss
    bool is_other;  // whether another thread block writes the column
};

// Find the place of a column. column: column that represents the selected position; below 0 if that is not wanted.
// first_victim: first victim of this thread block.
template <int kColumnRounds, bool kIsCluster>
__device__ __forceinline__ Target find_target(
    const Cluster<kIsCluster>& cluster,
    const Scratch<kColumnRounds>& scratch,
    const Request& request,
    int32_t selected,
    int32_t column,
    int32_t first_victim
) {
    const bool is_wanted = column >= 0;
    int32_t slot = request.is_valid(selected) ? request.added.slot(selected) : -1;
    if (is_wanted) slot = scratch.chosen[column];
    const int32_t miss = is_wanted && slot < 0 ? ~slot : -1;
    if (miss >= 0) slot = scratch.victims[miss];
    bool is_other = false;
    if constexpr (kIsCluster) {
        const bool takes_rest = cluster.rank == cluster.size - 1 && miss >= first_victim;
        is_other = is_wanted ? slot == scratch.kNone || (slot < 0 && !takes_rest) : cluster.rank != 0;
    }
    const bool has_place = slot >= 0 && !is_other;
    const Place place = request.place(has_place ? slot : 0);  // NOTE: outside of a branch, so that loads do not wait
    return {has_place ? place : Place{-1, -1}, miss, is_other};
}

// Write the places of selected rows in this thread block's slots, and the misses that take these slots, both in the
// order of the selected positions; record the misses in the residency. The last block writes the columns without a
// slot.
// NOTE: every miss has a victim, because there are at least as many slots as columns (`HiSparseConfig`).
template <int kColumnRounds, bool kIsCluster>
__device__ __forceinline__ void write_columns(
    const Cluster<kIsCluster>& cluster,
    const Residency& residency,
    const Resolved& out,
    const Scratch<kColumnRounds>& scratch,
    const Request& request,
    const Share& columns,
    const int32_t (&selected)[kColumnRounds],
    const int32_t (&host_blocks)[kColumnRounds],
    const Found<kColumnRounds>& found,
    int32_t first_victim
) {
    constexpr int kTogether = 2;
    const int64_t first_out = static_cast<int64_t>(request.batch_index) * out.num_columns;
#pragma unroll
    for (int first = 0; first < kColumnRounds; first += kTogether) {
        Target targets[kTogether];
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
            const int i = first + j;
            targets[j] = find_target(cluster, scratch, request, selected[i], found.columns[i], first_victim);
        }
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
            const int i = first + j;
            const Target& target = targets[j];
            if (!columns.has(i) || target.is_other) continue;
            const bool missed = target.miss >= 0 && (found.lead_bits >> i & 1);
            const int64_t host_row_id = missed ? request.host_row_id(selected[i], host_blocks[i]) : -1;
            const int64_t place = first_out + columns.at(i), miss_place = first_out + target.miss;
            write_column(out, place, miss_place, target.place.row_id, missed, host_row_id);
            if (missed && target.place.entry >= 0) {
                residency.entries[target.place.entry] = {selected[i], request.first_expiry()};
            }
        }
    }
}

// Resolve a request that does not fit: a hash table finds hits, and ages choose victims. Each thread block of a cluster
// has all columns and a run of the slots, and writes the columns whose rows are in these slots.
template <int kColumnRounds, bool kHasDrafts, bool kIsCluster>
__device__ __forceinline__ void resolve_evicting(
    const Cluster<kIsCluster>& cluster,
    const Residency& residency,
    const Request& request,
    int64_t* counts,
    const Resolved& out,
    const Share& columns,
    const int32_t (&selected)[kColumnRounds],
    const Divisor& selection_size,
    const Scratch<kColumnRounds>& scratch,
    Shared& shared
) {
    const int32_t num_slots = request.added.first_slot;
    const SlotRun run(num_slots, cluster);
    HeldSlots ahead;
    ahead.load(residency, request, run.first + threadIdx.x, run.end);
    scratch.clear_ages(run.size());
    __syncthreads();

    map_columns(scratch, request, columns, selected);
    __syncthreads();
    if (cluster.rank == 0) {
        note_valid<kColumnRounds, kHasDrafts>(request, columns, selected, selection_size, shared.num_valid);
    }

    const int num_found = find_hits(residency, scratch, request, run, ahead);
    const int num_found_by_warp = __reduce_add_sync(kAllLanes, num_found);
    if (lane_index() == 0) atomicAdd(&shared.num_found, num_found_by_warp);
    const auto found = find_columns<kColumnRounds, kHasDrafts>(scratch, request, columns, selected);
    __syncthreads();

    uint32_t own = find_own_hits(scratch, found);
    Hits hits;
    Aged aged;
    Tally total;
    const auto count = [&] {
        hits = share_hits<kColumnRounds>(cluster, shared, own);
        count_columns<kColumnRounds>(found.lead_bits, hits.of_any, shared.tallies);
        aged = count_aged(cluster, scratch, shared);
        __syncthreads();
        total = {sum_all(shared.tallies)};
    };
    count();
    if (hits.num_slots != total.hits()) {
        own = empty_doubles(cluster, residency, scratch, request, run, found, hits, own);
        count();
    }
    cluster.arrive();  // this block reads nothing more from other blocks
    const Tally before{sum_before(shared.tallies)};
    const uint32_t miss_bits = found.lead_bits & ~hits.of_any;
    int32_t host_blocks[kColumnRounds];
    load_host_blocks(request, selected, miss_bits, host_blocks);
    if (total.misses() > 0) {
        number_misses(scratch, found, miss_bits, before.misses());
        find_cut<kIsCluster>(aged, total.misses(), shared);
        __syncthreads();
        choose_victims(residency, scratch, request, run, shared);
        __syncthreads();
    }
    const int32_t first_victim = shared.cut.num_older_before + min(shared.cut.num_equal_before, shared.cut.num_of_age);
    write_columns(cluster, residency, out, scratch, request, columns, selected, host_blocks, found, first_victim);
    if (cluster.rank == 0) {
        // New rows overwrite the rows in the reserved slots.
        if (threadIdx.x < request.decode.max_query_len) {
            residency.entries[request.place(num_slots + threadIdx.x).entry].x = -1;
        }
        report(counts, residency.num_layers, request, total, shared.num_valid, out);
    }
    cluster.wait();  // until other blocks arrive, they may read this block's memory
}

}  // namespace hisparse
