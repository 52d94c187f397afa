#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "common.cuh"

namespace hisparse {

namespace {

constexpr int kBoundThreads = 256;
constexpr int kPagesPerBlock = 128;

__device__ inline float to_float(__nv_bfloat16 x) {
    return __bfloat162float(x);
}
__device__ inline float to_float(__half x) {
    return __half2float(x);
}

template <typename T>
union Vector {
    uint4 bits;
    T elements[kBoundsVector];
};

// Return the offset of the bounds of a request's page, in elements.
__device__ inline int64_t page_start(const PageBounds& bounds, int64_t request_index, int32_t page) {
    const int64_t block = bounds.table[request_index * bounds.table_stride + page / bounds.pages_per_block];
    const int64_t page_elements = int64_t{2} * bounds.num_heads * bounds.head_size;
    return block * bounds.block_stride + page % bounds.pages_per_block * page_elements;
}

// One warp per request and KV head.
template <typename T>
__global__ void __launch_bounds__(kBoundThreads) update_page_bounds_kernel(
    const PageBounds bounds,
    const LatestBounds latest,
    const int64_t* __restrict__ request_indices,  // [batch]
    const int64_t* __restrict__ positions,        // [batch]
    const T* __restrict__ keys,                   // [batch, num_heads, head_size], tokens key_stride elements apart
    const int64_t key_stride,
    const int32_t batch
) {
    const int index = (blockIdx.x * kBoundThreads + threadIdx.x) / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int batch_index = index / bounds.num_heads, head = index % bounds.num_heads, first = lane * kBoundsVector;
    if (batch_index >= batch || first >= bounds.head_size) return;
    const int64_t position = positions[batch_index], request_index = request_indices[batch_index];
    // Distance from the minima of a page to its maxima, and offset of this lane's elements in both.
    const int64_t kind_stride = static_cast<int64_t>(bounds.num_heads) * bounds.head_size;
    const int64_t offset = head * bounds.head_size + first;
    const auto vector = [](void* base, int64_t at) { return reinterpret_cast<uint4*>(static_cast<T*>(base) + at); };
    const int32_t page = static_cast<int32_t>(position / bounds.page_size);
    const int64_t minima = page_start(bounds, request_index, page) + offset, maxima = minima + kind_stride;
    Vector<T> key, low, high;
    key.bits = *reinterpret_cast<const uint4*>(keys + batch_index * key_stride + offset);
    low.bits = high.bits = key.bits;
    // Place of the minima after a position.
    const auto kept_at = [&](int64_t after) {
        return (request_index * latest.count + after % latest.count) * 2 * kind_stride + offset;
    };
    if (position % bounds.page_size != 0) {
        const bool is_kept = latest.count != 0;
        void* const source = is_kept ? latest.bounds : bounds.blocks;
        const int64_t before = is_kept ? kept_at(position - 1) : minima;
        low.bits = *vector(source, before);
        high.bits = *vector(source, before + kind_stride);
#pragma unroll
        for (int i = 0; i < kBoundsVector; ++i) {
            low.elements[i] = __hmin(low.elements[i], key.elements[i]);
            high.elements[i] = __hmax(high.elements[i], key.elements[i]);
        }
    }
    *vector(bounds.blocks, minima) = low.bits;
    *vector(bounds.blocks, maxima) = high.bits;
    if (latest.count == 0) return;
    const int64_t own = kept_at(position);
    *vector(latest.bounds, own) = low.bits;
    *vector(latest.bounds, own + kind_stride) = high.bits;
}

// One thread block per request, KV head and kPagesPerBlock pages; `lanes` lanes of a warp share a page.
template <typename T>
__global__ void __launch_bounds__(kBoundThreads) page_scores_kernel(
    const PageBounds bounds,
    const int64_t* __restrict__ request_indices,  // [batch]
    const int64_t* __restrict__ num_tokens,       // [batch]
    const T* __restrict__ query,                  // [batch, num_heads * group, head_size], query_stride apart
    const int64_t query_stride,
    const int32_t group,
    const int32_t lanes,
    float* scores  // [batch, num_heads, max_pages]; only pages that a request has are written
) {
    extern __shared__ float shared_query[];  // [group, head_size]
    __shared__ int64_t page_starts[kPagesPerBlock];
    const int head = blockIdx.y, batch_index = blockIdx.z, size = bounds.head_size;
    const int64_t num_pages = (num_tokens[batch_index] + bounds.page_size - 1) / bounds.page_size;
    if (static_cast<int64_t>(blockIdx.x) * kPagesPerBlock >= num_pages) return;  // the grid is for the longest request
    const T* heads = query + batch_index * query_stride + static_cast<int64_t>(head) * group * size;
    for (int i = threadIdx.x; i < group * size; i += kBoundThreads) shared_query[i] = to_float(heads[i]);
    for (int i = threadIdx.x; i < kPagesPerBlock; i += kBoundThreads) {
        const int page = blockIdx.x * kPagesPerBlock + i;
        if (page < num_pages) page_starts[i] = page_start(bounds, request_indices[batch_index], page);
    }
    __syncthreads();
    const int64_t kind_stride = static_cast<int64_t>(bounds.num_heads) * size;
    const T* pages = static_cast<const T*>(bounds.blocks) + static_cast<int64_t>(head) * size;
    float* out = scores + (static_cast<int64_t>(batch_index) * bounds.num_heads + head) * bounds.max_pages;
    const int lane = threadIdx.x % lanes, first = lane * kBoundsVector;
    for (int i = threadIdx.x / lanes; i < kPagesPerBlock; i += kBoundThreads / lanes) {
        const int page = blockIdx.x * kPagesPerBlock + i;
        const bool loads = page < num_pages && first < size;
        Vector<T> low, high;
        low.bits = high.bits = uint4{};
        if (loads) {
            const T* minima = pages + page_starts[i] + first;
            low.bits = load_once(reinterpret_cast<const uint4*>(minima));
            high.bits = load_once(reinterpret_cast<const uint4*>(minima + kind_stride));
        }
        float best = -CUDART_INF_F;
        for (int g = 0; g < group; ++g) {
            float sum = 0;
            if (loads) {
                const float* q = shared_query + g * size + first;
#pragma unroll
                for (int k = 0; k < kBoundsVector; ++k) {
                    sum += fmaxf(q[k] * to_float(low.elements[k]), q[k] * to_float(high.elements[k]));
                }
            }
            for (int distance = lanes / 2; distance > 0; distance /= 2) {
                sum += __shfl_xor_sync(kAllLanes, sum, distance);
            }
            best = fmaxf(best, sum);
        }
        if (lane == 0 && page < num_pages) out[page] = best;
    }
}

template <typename T>
cudaError_t update_page_bounds(
    const PageBounds& bounds,
    const LatestBounds& latest,
    const int64_t* request_indices,
    const int64_t* positions,
    const void* keys,
    int64_t key_stride,
    int32_t batch,
    cudaStream_t stream
) {
    const int num_blocks = (batch * bounds.num_heads * kWarpSize + kBoundThreads - 1) / kBoundThreads;
    update_page_bounds_kernel<T><<<num_blocks, kBoundThreads, 0, stream>>>(
        bounds, latest, request_indices, positions, static_cast<const T*>(keys), key_stride, batch
    );
    return cudaGetLastError();
}

template <typename T>
cudaError_t page_scores(
    const PageBounds& bounds,
    const int64_t* request_indices,
    const int64_t* num_tokens,
    const void* query,
    int64_t query_stride,
    int32_t group,
    int32_t batch,
    float* scores,
    cudaStream_t stream
) {
    int lanes = 1;
    while (lanes * kBoundsVector < bounds.head_size) lanes *= 2;
    const dim3 grid((bounds.max_pages + kPagesPerBlock - 1) / kPagesPerBlock, bounds.num_heads, batch);
    const size_t shared_bytes = sizeof(float) * group * bounds.head_size;
    page_scores_kernel<T><<<grid, kBoundThreads, shared_bytes, stream>>>(
        bounds, request_indices, num_tokens, static_cast<const T*>(query), query_stride, group, lanes, scores
    );
    return cudaGetLastError();
}

}  // namespace
}  // namespace hisparse

using namespace hisparse;

cudaError_t hisparse::launch_update_page_bounds(
    const PageBounds& bounds,
    const LatestBounds& latest,
    const int64_t* request_indices,
    const int64_t* positions,
    const void* keys,
    int64_t key_stride,
    int32_t batch,
    bool is_bfloat16,
    cudaStream_t stream
) {
    if (batch == 0) return cudaSuccess;
    const auto run = is_bfloat16 ? update_page_bounds<__nv_bfloat16> : update_page_bounds<__half>;
    return run(bounds, latest, request_indices, positions, keys, key_stride, batch, stream);
}

cudaError_t hisparse::launch_page_scores(
    const PageBounds& bounds,
    const int64_t* request_indices,
    const int64_t* num_tokens,
    const void* query,
    int64_t query_stride,
    int32_t group,
    int32_t batch,
    bool is_bfloat16,
    float* scores,
    cudaStream_t stream
) {
    if (batch == 0) return cudaSuccess;
    const auto run = is_bfloat16 ? page_scores<__nv_bfloat16> : page_scores<__half>;
    return run(bounds, request_indices, num_tokens, query, query_stride, group, batch, scores, stream);
}
