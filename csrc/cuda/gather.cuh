#pragma once

#include "common.cuh"

// Copy missed rows to their hot slots: `SwapInOps.gather`.
//
// beside_others: kernels of other streams run at the same time, and are left most multiprocessors.
// after_resolve: the launch before on this stream is `hisparse_resolve`; do not wait for its end to start.
extern "C" cudaError_t hisparse_gather(
    const hisparse::HostRows* host,
    const hisparse::HotRows* hot,
    const hisparse::Resolved* resolved,
    int32_t batch,
    bool beside_others,
    bool after_resolve,
    cudaStream_t stream
);
