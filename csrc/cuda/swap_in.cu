#include "common.cuh"

using namespace hisparse;

namespace {

// Return true if kernels of the current device can start before the kernel that they depend on has ended.
cudaError_t has_dependent_launch(bool* result) {
    int device = 0, major = 0;
    if (const cudaError_t error = cudaGetDevice(&device)) return error;
    const cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    *result = major >= 9;
    return error;
}

}  // namespace

cudaError_t hisparse::launch_swap_in(
    const Residency& residency,
    const DecodeMetadata& decode,
    const int32_t* selected_positions,
    int64_t selected_stride,
    const HostRows& host,
    const HotRows& hot,
    int64_t* counts,
    const Resolved& out,
    bool shares_device,
    cudaStream_t stream
) {
    bool overlaps = false;
    if (const cudaError_t error = has_dependent_launch(&overlaps)) return error;
    const cudaError_t error =
        launch_resolve(residency, decode, selected_positions, selected_stride, hot, counts, out, shares_device, stream);
    return error ? error : launch_gather(host, hot, out, decode.batch, shares_device, overlaps, stream);
}
