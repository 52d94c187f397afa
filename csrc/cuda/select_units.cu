#include "common.cuh"

namespace hisparse {
namespace {

constexpr int kSelectThreads = 512;
constexpr int kSelectWarps = kSelectThreads / kWarpSize;
constexpr int kDigitBits = 8, kNumDigits = 1 << kDigitBits;
constexpr uint32_t kNothing = 0x007fffff;  // key of -infinity: never selected

// Unsigned order of the keys is the order of the scores.
__device__ inline uint32_t sort_key(float score) {
    const uint32_t bits = __float_as_uint(score);
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// Exclusive sum over the threads of the block. `sums`: [kSelectWarps] in shared memory.
__device__ inline int32_t sum_before(int32_t value, int32_t* sums) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
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

// One thread block per row: the key of rank `num_wanted` digit by digit, then everything above it and, of its equals,
// the first ones.
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
    const int64_t row = blockIdx.x;
    const int64_t tokens = num_tokens[row / num_heads];
    const int32_t newest = static_cast<int32_t>((tokens + tokens_per_unit - 1) / tokens_per_unit) - 1;
    const float* own = scores + row * max_units;
    int32_t* out = units + row * num_selected;

    if (threadIdx.x == 0) {
        threshold = 0;
        num_left = num_selected - 1;
    }
    uint32_t mask = 0;
    for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) {
        for (int i = threadIdx.x; i < kNumDigits; i += kSelectThreads) histogram[i] = 0;
        __syncthreads();
        const uint32_t prefix = threshold;
        for (int i = threadIdx.x; i < newest; i += kSelectThreads) {
            const uint32_t key = sort_key(own[i]);
            if ((key & mask) == prefix) atomicAdd(histogram + (key >> shift & (kNumDigits - 1)), 1);
        }
        __syncthreads();
        if (threadIdx.x < kWarpSize) {
            // The largest digit such that fewer than num_left keys have larger ones, or 0.
            constexpr int kRun = kNumDigits / kWarpSize;
            const int last = kNumDigits - 1 - static_cast<int>(threadIdx.x) * kRun;  // lane 0 has the largest digits
            int32_t own_sum = 0;
            for (int i = 0; i < kRun; ++i) own_sum += histogram[last - i];
            int32_t sum = own_sum;
            for (int distance = 1; distance < kWarpSize; distance *= 2) {
                const int32_t other = __shfl_up_sync(kAllLanes, sum, distance);
                if (static_cast<int>(threadIdx.x) >= distance) sum += other;
            }
            const int32_t wanted = num_left;
            const uint32_t reached = __ballot_sync(kAllLanes, sum >= wanted);
            const int lane = reached ? __ffs(reached) - 1 : kWarpSize - 1;
            if (static_cast<int>(threadIdx.x) == lane) {
                int32_t above = sum - own_sum;
                int digit = last;
                while (digit > last - kRun + 1 && above + histogram[digit] < wanted) above += histogram[digit--];
                threshold = prefix | static_cast<uint32_t>(digit) << shift;
                num_left = wanted - above;
            }
        }
        mask |= static_cast<uint32_t>(kNumDigits - 1) << shift;
        __syncthreads();
    }

    const uint32_t limit = threshold;
    const int32_t num_equal = num_left;
    const int32_t run = (newest + kSelectThreads - 1) / kSelectThreads;
    const int32_t first = min(static_cast<int32_t>(threadIdx.x) * run, max(newest, 0));
    const int32_t last = min(first + run, max(newest, 0));
    int32_t above = 0, equal = 0;
    for (int32_t i = first; i < last; ++i) {
        const uint32_t key = sort_key(own[i]);
        above += key > limit && key > kNothing;
        equal += key == limit && key > kNothing;
    }
    const int32_t equal_before = sum_before(equal, sums);
    const int32_t taken = above + max(0, min(equal, num_equal - equal_before));
    int32_t place = sum_before(taken, sums);
    int32_t equals_left = max(0, min(equal, num_equal - equal_before));
    for (int32_t i = first; i < last; ++i) {
        const uint32_t key = sort_key(own[i]);
        if (key <= kNothing || key < limit) continue;
        if (key == limit && equals_left-- <= 0) continue;
        out[place++] = i;
    }
    __shared__ int32_t total;
    if (threadIdx.x == kSelectThreads - 1) total = place;
    __syncthreads();
    const int32_t count = total;
    for (int i = count + threadIdx.x; i < num_selected; i += kSelectThreads) {
        out[i] = i == count && newest >= 0 ? newest : -1;
    }
}

}  // namespace
}  // namespace hisparse

using namespace hisparse;

// The best units of each row, the newest last: `ops/select_units.py`.
extern "C" cudaError_t hisparse_select_units(
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
