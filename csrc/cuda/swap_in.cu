#include "gather.cuh"
#include "resolve.cuh"

using namespace hisparse;

namespace {

// Whether kernels of the current device can start before the one that they depend on has ended.
cudaError_t has_dependent_launch(bool* result) {
    int device = 0, major = 0;
    if (const cudaError_t error = cudaGetDevice(&device)) return error;
    const cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    *result = major >= 9;
    return error;
}

}  // namespace

// Resolve, then gather, whose launch overlaps the resolution: `SwapInOps.swap_in`.
//
// top_k, counts: as in `hisparse_resolve`. beside_others: as in `hisparse_gather`.
extern "C" cudaError_t hisparse_swap_in(
    const Residency* residency,
    const StepTables* tables,
    const int32_t* top_k,
    int64_t top_k_stride,
    const HostRows* host,
    const HotRows* hot,
    int64_t* counts,
    const Resolved* out,
    bool beside_others,
    cudaStream_t stream
) {
    bool overlaps = false;
    if (const cudaError_t error = has_dependent_launch(&overlaps)) return error;
    const cudaError_t error =
        launch_resolve(*residency, *tables, top_k, top_k_stride, *hot, counts, *out, beside_others, stream);
    return error ? error : hisparse_gather(host, hot, out, tables->batch, beside_others, overlaps, stream);
}
