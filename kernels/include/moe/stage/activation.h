// The activation between the two GEMMs on the device, in fp32, on values of h that are already rounded to bf16. Called
// by the gate_up epilogue. The formulas and their sources stand in reference/activation.py; three of the four gated
// ones are one formula with different numbers:
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
  constexpr float kMinusLog2E = -1.4426950408889634f;
  const bool bounded = !std::isinf(limit);
  switch (activation) {
    case Activation::kSwiglu:
      return {bounded ? ActivationForm::kSigmoid : ActivationForm::kSilu, kMinusLog2E, 0.0f, 0.0f, limit};
    case Activation::kSwigluOai:
      return {ActivationForm::kSigmoid, kMinusLog2E * alpha, 0.0f, 1.0f, limit};
    case Activation::kGegluTanh:
      return {ActivationForm::kSigmoid, kMinusLog2E * kTanhScale, kMinusLog2E * kTanhScale * 0.044715f, 0.0f, limit};
    case Activation::kGegluErf:
      return {ActivationForm::kErf, 0.0f, 0.0f, 0.0f, limit};
    default:
      return {ActivationForm::kRelu2, 0.0f, 0.0f, 0.0f, limit};
  }
}

// 1 / (1 + 2^exponent). Relative error about 2^-21: two approximate instructions.
__device__ inline float sigmoid_of_exponent(float exponent) {
  float power, quotient;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(1.0f + power));
  return quotient;
}
// NaN stays NaN.
__device__ inline float min_nan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ inline float max_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

template <ActivationForm kForm>
__device__ inline float activate(const ActivationParams& p, float gate, float up) {
  if constexpr (kForm == ActivationForm::kSilu) {
    return gate * sigmoid_of_exponent(gate * p.linear) * up;
  } else if constexpr (kForm == ActivationForm::kSigmoid) {
    const float g = min_nan(gate, p.limit);
    const float u = max_nan(min_nan(up, p.limit), -p.limit);
    return g * sigmoid_of_exponent(g * fmaf(p.cubic * g, g, p.linear)) * (u + p.up_offset);
  } else if constexpr (kForm == ActivationForm::kErf) {
    return 0.5f * gate * (1.0f + erff(gate * 0.70710678118654752f)) * up;
  } else {
    const float positive = max_nan(gate, 0.0f);
    return positive * positive;
  }
}

}  // namespace moe
