// The derivative of the activation on the device, in fp32, on values of h that are already rounded to bf16. Called by
// the epilogue of the down dgrad. The formulas stand in reference/activation.py; for the forms see stage/activation.h.
//
// With v(g) the activation of the gate alone, a = v(g) * (u + up_offset): grad_up = d v(g), grad_gate = d v'(g) (u +
// up_offset), and 0 where a limit has clamped the value. For the sigmoid forms v = g sigma(z), so v' = sigma + g sigma
// (1 - sigma) z'.
#pragma once

#include "moe/stage/activation.h"

namespace moe {

// Of one column: the activation (unrounded) and its derivatives with respect to gate and up.
struct ActivationSlopes {
  float value;
  float gate;
  float up;
};

template <ActivationForm kForm>
__device__ inline ActivationSlopes activation_slopes(const ActivationParams& p, float gate, float up) {
  if constexpr (kForm == ActivationForm::kSilu) {
    const float sigma = sigmoid_of_exponent(gate * p.linear);
    const float v = gate * sigma;
    return {v * up, (sigma + fmaf(-v, sigma, v)) * up, v};
  } else if constexpr (kForm == ActivationForm::kSigmoid) {
    constexpr float kMinusLn2 = -0.69314718055994531f;
    const float g = min_nan(gate, p.limit);
    const float u = max_nan(min_nan(up, p.limit), -p.limit) + p.up_offset;
    const float square = p.cubic * g;
    const float sigma = sigmoid_of_exponent(g * fmaf(square, g, p.linear));
    const float v = g * sigma;
    // z = -ln 2 * g (linear + cubic g^2), so z' = -ln 2 (linear + 3 cubic g^2)
    const float slope = kMinusLn2 * fmaf(3.0f * square, g, p.linear);
    const float gate_slope = fmaf(fmaf(-v, sigma, v), slope, sigma) * u;
    return {v * u, gate > p.limit ? 0.0f : gate_slope, fabsf(up) > p.limit ? 0.0f : v};
  } else if constexpr (kForm == ActivationForm::kErf) {
    const float phi = 0.5f * (1.0f + erff(gate * 0.70710678118654752f));
    const float v = gate * phi;
    const float density = 0.3989422804014327f * expf(-0.5f * gate * gate);
    return {v * up, fmaf(gate, density, phi) * up, v};
  } else {
    const float positive = max_nan(gate, 0.0f);
    return {positive * positive, 2.0f * positive, 0.0f};
  }
}

}  // namespace moe
