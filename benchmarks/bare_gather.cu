// The bare limit of copies by the device: one warp per row, 16 bytes per lane, row ids given, nothing else.
#include <cstdint>
#include <cuda_runtime.h>

constexpr int kNumThreads = 1024;
constexpr int kWarpSize = 32;
constexpr int kNumBlocks = 132;
constexpr int kUnroll = 4;

__global__ void __launch_bounds__(kNumThreads, 2) bare_gather_kernel(
    const uint4* host,           // [host rows, row_vectors] in pinned host memory
    uint4* hot,                  // [hot rows, row_vectors] on the device
    const int64_t* host_rows,    // [num_rows]
    const int32_t* hot_rows,     // [num_rows]
    const int32_t num_rows,
    const int32_t row_vectors
) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int num_warps = kNumThreads / kWarpSize * gridDim.x;
    for (int row = warp * gridDim.x + blockIdx.x; row < num_rows; row += num_warps) {
        const uint4* from = host + host_rows[row] * row_vectors;
        uint4* to = hot + static_cast<int64_t>(hot_rows[row]) * row_vectors;
        for (int first = lane; first < row_vectors; first += kUnroll * kWarpSize) {
            uint4 values[kUnroll];
#pragma unroll
            for (int i = 0; i < kUnroll; ++i) {
                if (first + i * kWarpSize < row_vectors) values[i] = __ldcs(from + first + i * kWarpSize);
            }
#pragma unroll
            for (int i = 0; i < kUnroll; ++i) {
                if (first + i * kWarpSize < row_vectors) __stcs(to + first + i * kWarpSize, values[i]);
            }
        }
    }
}

extern "C" cudaError_t bare_gather(
    const uint4* host,
    uint4* hot,
    const int64_t* host_rows,
    const int32_t* hot_rows,
    int32_t num_rows,
    int32_t row_vectors,
    cudaStream_t stream
) {
    bare_gather_kernel<<<kNumBlocks, kNumThreads, 0, stream>>>(host, hot, host_rows, hot_rows, num_rows, row_vectors);
    return cudaGetLastError();
}
