#pragma once

#include "common.cuh"

// Find hits, choose victims and update the residency: `SwapInOps.resolve`.
//
// top_k: [batch, out->top_k] on the device, rows top_k_stride apart. counts: [num_requests, 2] on the device.
extern "C" cudaError_t hisparse_resolve(
    const hisparse::Residency* residency,
    const hisparse::StepTables* tables,
    const int32_t* top_k,
    int64_t top_k_stride,
    const hisparse::HotRows* hot,
    int64_t* counts,
    const hisparse::Resolved* out,
    cudaStream_t stream
);
