// The one place that knows whether a header is being compiled for the host or for the device.
// Everything under include/moe/plan marks its functions with MOE_HOST_DEVICE, so that a CPU test and a kernel run the
// same source; a plain C++17 compiler sees an empty macro and needs no CUDA header.
#pragma once

#if defined(__CUDACC__)
#define MOE_HOST_DEVICE __host__ __device__
#else
#define MOE_HOST_DEVICE
#endif
