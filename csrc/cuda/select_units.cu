#include "common.cuh"

namespace hisparse {
namespace {

constexpr int kSelectThreads = 512;
constexpr int kSelectWarps = kSelectThreads / kWarpSize;
constexpr int kDigitBits = 8, kNumDigits = 1 << kDigitBits;
constexpr uint32_t kNothing = 0x007fffff;  // key of -infinity; this key and lower ones are never selected

// Return a key whose unsigned order is the order of the scores. NaN has the lowest key.
__device__ inline uint32_t sort_key(float score) {
    if (isnan(score)) return 0;
    const uint32_t bits = __float_as_uint(score);
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// Return the exclusive prefix sum over the threads of the block. sums: [kSelectWarps] in shared memory.
__device__ inline int32_t sum_before(int32_t value, int32_t* sums) {
    const int warp = warp_index(), lane = lane_index();
    int32_t sum = value;
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const int32_t other = __shfl_up_sync(kAllLanes, sum, distance);
        if (lane >= distance) sum += other;
    }
    __syncthreads();
    if (lane == kWarpSize - 1) sums[warp] = sum;
    __syncthreads();
    return sum - value + __reduce_add_sync(kAllLanes, lane < warp && lane < kSelectWarps ? sums[lane] : 0);
}

// Count keys by their next digit, among keys that have the known digits of the threshold. mask: bits of the known
// digits.
__device__ __forceinline__ void count_digits(
    const float* scores, int32_t num_scores, uint32_t mask, const uint32_t* threshold, int shift, int32_t* histogram
) {
    for (int i = threadIdx.x; i < kNumDigits; i += kSelectThreads) histogram[i] = 0;
    __syncthreads();
    const uint32_t prefix = *threshold;
    for (int i = threadIdx.x; i < num_scores; i += kSelectThreads) {
        const uint32_t key = sort_key(scores[i]);
        if ((key & mask) == prefix) atomicAdd(histogram + (key >> shift & (kNumDigits - 1)), 1);
    }
    __syncthreads();
}

// Append to the threshold the digit of the key of rank *num_left, or 0 if there are fewer keys, and subtract the keys
// with larger digits from *num_left. Called by one warp.
__device__ __forceinline__ void choose_digit(
    const int32_t* histogram, int shift, uint32_t* threshold, int32_t* num_left
) {
    constexpr int kRun = kNumDigits / kWarpSize;
    const int own_lane = static_cast<int>(threadIdx.x);
    const int last = kNumDigits - 1 - own_lane * kRun;  // lane 0 handles the largest digits
    const uint32_t prefix = *threshold;
    int32_t own_sum = 0;
    for (int i = 0; i < kRun; ++i) own_sum += histogram[last - i];
    int32_t sum = own_sum;
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const int32_t other = __shfl_up_sync(kAllLanes, sum, distance);
        if (own_lane >= distance) sum += other;
    }
    const int32_t wanted = *num_left;
    const uint32_t reached = __ballot_sync(kAllLanes, sum >= wanted);
    if (own_lane != (reached ? __ffs(reached) - 1 : kWarpSize - 1)) return;
    int32_t above = sum - own_sum;
    int digit = last;
    while (digit > last - kRun + 1 && above + histogram[digit] < wanted) above += histogram[digit--];
    *threshold = prefix | static_cast<uint32_t>(digit) << shift;
    *num_left = wanted - above;
}

// Find the key of rank *num_left, digit by digit. *num_left becomes the number of selected units that have this key.
__device__ __forceinline__ void find_threshold(
    const float* scores, int32_t num_scores, int32_t* histogram, uint32_t* threshold, int32_t* num_left
) {
    uint32_t mask = 0;
    for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) {
        count_digits(scores, num_scores, mask, threshold, shift, histogram);
        if (threadIdx.x < kWarpSize) choose_digit(histogram, shift, threshold, num_left);
        mask |= static_cast<uint32_t>(kNumDigits - 1) << shift;
        __syncthreads();
    }
}

// Write the units above the threshold, and the first `num_equal` units with the threshold's key; each thread writes
// those of its run. Returns the end of the thread's units; for the last thread, this is the number of all.
__device__ __forceinline__ int32_t write_best(
    const float* scores, int32_t num_scores, uint32_t threshold, int32_t num_equal, int32_t* sums, int32_t* units
) {
    const int32_t run = (num_scores + kSelectThreads - 1) / kSelectThreads;
    const int32_t first = min(static_cast<int32_t>(threadIdx.x) * run, max(num_scores, 0));
    const int32_t last = min(first + run, max(num_scores, 0));
    int32_t above = 0, equal = 0;
    for (int32_t i = first; i < last; ++i) {
        const uint32_t key = sort_key(scores[i]);
        above += key > threshold && key > kNothing;
        equal += key == threshold && key > kNothing;
    }
    int32_t equals_left = max(0, min(equal, num_equal - sum_before(equal, sums)));
    int32_t place = sum_before(above + equals_left, sums);
    for (int32_t i = first; i < last; ++i) {
        const uint32_t key = sort_key(scores[i]);
        if (key <= kNothing || key < threshold) continue;
        if (key == threshold && equals_left-- <= 0) continue;
        units[place++] = i;
    }
    return place;
}

// One thread block per request and KV head. It finds the key of rank `num_selected - 1`, and writes the units above it,
// the first units with this key, and then the newest unit.
__global__ void __launch_bounds__(kSelectThreads) select_units_kernel(
    const float* __restrict__ scores,        // [batch, num_heads, max_units]
    const int64_t* __restrict__ num_tokens,  // [batch]
    const int32_t num_heads,
    const int32_t max_units,
    const int32_t tokens_per_unit,
    const int32_t num_selected,
    int32_t* units  // [batch, num_heads, num_selected]
) {
    __shared__ int32_t histogram[kNumDigits];
    __shared__ int32_t sums[kSelectWarps];
    __shared__ uint32_t threshold;
    __shared__ int32_t num_left;
    __shared__ int32_t num_best;
    const int64_t head_index = blockIdx.x;
    const int64_t tokens = num_tokens[head_index / num_heads];
    const int32_t newest = static_cast<int32_t>((tokens + tokens_per_unit - 1) / tokens_per_unit) - 1;
    const float* own = scores + head_index * max_units;
    int32_t* out = units + head_index * num_selected;

    if (threadIdx.x == 0) {
        threshold = 0;
        num_left = num_selected - 1;
    }
    find_threshold(own, newest, histogram, &threshold, &num_left);
    const int32_t place = write_best(own, newest, threshold, num_left, sums, out);
    if (threadIdx.x == kSelectThreads - 1) num_best = place;
    __syncthreads();
    for (int i = num_best + threadIdx.x; i < num_selected; i += kSelectThreads) {
        out[i] = i == num_best && newest >= 0 ? newest : -1;
    }
}

}  // namespace
}  // namespace hisparse

using namespace hisparse;

cudaError_t hisparse::launch_select_units(
    const float* scores,
    const int64_t* num_tokens,
    int32_t batch,
    int32_t num_heads,
    int32_t max_units,
    int32_t tokens_per_unit,
    int32_t num_selected,
    int32_t* units,
    cudaStream_t stream
) {
    if (batch == 0) return cudaSuccess;
    select_units_kernel<<<batch * num_heads, kSelectThreads, 0, stream>>>(
        scores, num_tokens, num_heads, max_units, tokens_per_unit, num_selected, units
    );
    return cudaGetLastError();
}
