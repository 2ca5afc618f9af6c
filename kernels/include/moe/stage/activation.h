// The activation between the two GEMMs on the device, in fp32, on values of h that are already rounded to bf16. Called by
// the gate_up epilogue. The formulas and their sources stand in reference/activation.py; three of the four gated ones are
// one formula with different numbers:
//
//   swiglu       g * sigmoid(g) * u
//   swiglu_oai   g * sigmoid(alpha g) * (u + 1)
//   geglu_tanh   g/2 (1 + tanh(z)) * u = g * sigmoid(2 z) * u,  z = sqrt(2/pi) (g + 0.044715 g^3)
#pragma once

#include <cmath>

#include "moe/forward/kernel_params.h"

namespace moe {

inline ActivationParams activation_params(Activation activation, float alpha, float limit) {
  constexpr float kTanhScale = 1.5957691216057308f;  // 2 sqrt(2/pi)
  switch (activation) {
    case Activation::kSwiglu:
      return {ActivationForm::kSigmoid, 1.0f, 0.0f, 0.0f, limit};
    case Activation::kSwigluOai:
      return {ActivationForm::kSigmoid, alpha, 0.0f, 1.0f, limit};
    case Activation::kGegluTanh:
      return {ActivationForm::kSigmoid, kTanhScale, kTanhScale * 0.044715f, 0.0f, limit};
    case Activation::kGegluErf:
      return {ActivationForm::kErf, 1.0f, 0.0f, 0.0f, limit};
    default:
      return {ActivationForm::kRelu2, 1.0f, 0.0f, 0.0f, limit};
  }
}

// Relative error about 2^-21: two approximate instructions.
__device__ inline float sigmoid(float z) { return __fdividef(1.0f, 1.0f + __expf(-z)); }

template <ActivationForm kForm>
__device__ inline float activate(const ActivationParams& p, float gate, float up) {
  if constexpr (kForm == ActivationForm::kRelu2) {
    const float positive = gate < 0.0f ? 0.0f : gate;  // NaN stays NaN
    return positive * positive;
  } else if constexpr (kForm == ActivationForm::kErf) {
    return 0.5f * gate * (1.0f + erff(gate * 0.70710678118654752f)) * up;
  } else {
    // Comparisons, not fminf, so that NaN stays NaN.
    const float g = gate > p.limit ? p.limit : gate;
    const float bounded = up > p.limit ? p.limit : up;
    const float u = bounded < -p.limit ? -p.limit : bounded;
    const float z = g * fmaf(p.cubic * g, g, p.linear);
    return g * sigmoid(z) * (u + p.up_offset);
  }
}

}  // namespace moe
