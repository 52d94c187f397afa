#pragma once

#include "common.cuh"

// Copy missed rows to their hot slots: `SwapInOps.gather`.
//
// after_resolve: the launch before on this stream is `hisparse_resolve`; do not wait for its end to start.
extern "C" cudaError_t hisparse_gather(
    const hisparse::HostRows* host,
    const hisparse::HotRows* hot,
    const hisparse::Resolved* resolved,
    int32_t batch,
    bool after_resolve,
    cudaStream_t stream
);
