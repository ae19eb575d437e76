// A packed weight in either layout, and its products.
#pragma once

#include "kernels.h"

namespace tandem {

// `Matrix` of matrix.py.
struct Matrix {
    const void* weight;
    const bf16* bias;  // [columns] or null
    Index columns;     // N; of gate and up together
    Index inner;       // K
    Index is_split;    // in 12 bits a weight
};

inline void multiply(const Matrix& m, const bf16* x, Index rows, const bf16* residual, bf16* out) {
    if (m.is_split)
        tandem_split_linear(static_cast<const std::uint8_t*>(m.weight), m.columns, m.inner, x, m.inner, rows, m.bias,
                            residual, out);
    else
        tandem_linear(static_cast<const bf16*>(m.weight), m.columns, m.inner, x, m.inner, rows, m.bias, residual, out);
}

inline void multiply(const Matrix& m, const bf16* x, Index rows, float* out) {
    if (m.is_split)
        tandem_split_linear_float32(static_cast<const std::uint8_t*>(m.weight), m.columns, m.inner, x, m.inner, rows,
                                    m.bias, out);
    else
        tandem_linear_float32(static_cast<const bf16*>(m.weight), m.columns, m.inner, x, m.inner, rows, m.bias, out);
}

inline void multiply_gated(const Matrix& m, const bf16* x, Index rows, bf16* out) {
    if (m.is_split)
        tandem_split_gate_up_silu(static_cast<const std::uint8_t*>(m.weight), m.columns / 2, m.inner, x, m.inner, rows,
                                  m.bias, out);
    else
        tandem_gate_up_silu(static_cast<const bf16*>(m.weight), m.columns / 2, m.inner, x, m.inner, rows, m.bias, out);
}

}  // namespace tandem
