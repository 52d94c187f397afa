// Resolution of requests that fit: they have a slot for every token.
#pragma once

#include "resolve_request.cuh"

namespace hisparse {

constexpr int32_t kClaim = 1 << 30;  // a column claims a row by a negative expiry: the column minus this

// Find the place of each selected position of a sequence that fits. Returns the thread's rounds with a hit as bits.
// expiries: expiry of each selected row from this step on; columns with the same position get the same one.
template <int kColumnRounds>
__device__ __forceinline__ uint32_t find_fitting_hits(
    const Residency& residency,
    const Request& request,
    const int32_t (&selected)[kColumnRounds],
    Place (&places)[kColumnRounds],
    int32_t (&expiries)[kColumnRounds]
) {
    uint32_t hit_bits = 0;
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        places[i] = request.place(request.is_valid(selected[i]) ? selected[i] : 0);
    }
    // NOTE: the loads are outside of a branch, so that they do not wait for each other.
#pragma unroll
    for (int i = 0; i < kColumnRounds; ++i) {
        const int2 held = residency.entries[places[i].entry];
        const bool is_hit = request.wants(selected[i]) && held.x == selected[i];
        hit_bits |= is_hit << i;
        expiries[i] = is_hit ? request.next_expiry(held.y) : request.first_expiry();
        if (!request.is_valid(selected[i])) places[i] = {-1, -1};
    }
    return hit_bits;
}

// Return the thread's columns that are wanted, as bits; of columns with the same position, only the first.
template <int kColumnRounds, bool kHasDrafts>
__device__ __forceinline__ uint32_t find_fitting_leads(
    const Residency& residency,
    const Request& request,
    const Share& columns,
    const int32_t (&selected)[kColumnRounds],
    const Place (&places)[kColumnRounds]
) {
    uint32_t lead_bits = 0;
    if constexpr (kHasDrafts) __syncthreads();  // claims overwrite the expiries that `find_fitting_hits` reads
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
        // NOTE: this load bypasses the L1 cache, because atomics do not update it.
        const bool leads = __ldcg(&residency.entries[places[i].entry].y) == columns.at(i) - kClaim;
        if (!leads) lead_bits &= ~(1u << i);
    }
    return lead_bits;
}

// Write the places of selected rows, and the misses, both in the order of the selected positions. A miss of position p
// takes slot p.
template <int kColumnRounds>
__device__ __forceinline__ void write_fitting_columns(
    const Resolved& out,
    const Residency& residency,
    const Request& request,
    const Share& columns,
    const int32_t (&selected)[kColumnRounds],
    const Place (&places)[kColumnRounds],
    const int32_t (&expiries)[kColumnRounds],
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
        if (places[i].entry >= 0) residency.entries[places[i].entry].y = expiries[i];
    }
}

// Resolve a request that fits: position p is hot if slot p holds it. Nothing is searched or evicted.
template <int kColumnRounds, bool kHasDrafts>
__device__ __forceinline__ void resolve_fitting(
    const Residency& residency,
    const Request& request,
    int64_t* counts,
    const Resolved& out,
    const Share& columns,
    const int32_t (&selected)[kColumnRounds],
    const Divisor& selection_size,
    Shared& shared
) {
    Place places[kColumnRounds];
    int32_t expiries[kColumnRounds];
    const uint32_t hit_bits = find_fitting_hits(residency, request, selected, places, expiries);
    const uint32_t lead_bits =
        find_fitting_leads<kColumnRounds, kHasDrafts>(residency, request, columns, selected, places);
    count_columns<kColumnRounds>(lead_bits, hit_bits, shared.tallies);
    __syncthreads();
    note_valid<kColumnRounds, kHasDrafts>(request, columns, selected, selection_size, shared.num_valid);
    const Tally before{sum_before(shared.tallies)}, total{sum_all(shared.tallies)};
    const uint32_t miss_bits = lead_bits & ~hit_bits;
    write_fitting_columns(out, residency, request, columns, selected, places, expiries, miss_bits, before.misses());
    __syncthreads();
    const int32_t position = request.added.first + threadIdx.x;
    if (position < request.added.end) {
        residency.entries[request.place(position).entry] = {position, request.added.first};
    }
    report(counts, residency.num_layers, request, total, shared.num_valid, out);
}

}  // namespace hisparse
