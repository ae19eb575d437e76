// The kernels that layers.cpp and head.cpp put together, as the library exports them; each is described where it is defined.
#pragma once

#include "attention.h"

using tandem::Attention, tandem::bf16, tandem::Index;

TANDEM_EXPORT void tandem_rms_norm(const bf16* x, Index x_stride, Index rows, Index width,
                     const bf16* weight, float eps, bf16* y);
TANDEM_EXPORT void tandem_place_heads(bf16* heads, Index rows, Index num_heads, Index num_kv_heads,
                        Index width, const bf16* q_norm, const bf16* k_norm, float eps,
                        const bf16* cos, const bf16* sin, const std::int64_t* slots,
                        bf16* layer, Index block_size);
TANDEM_EXPORT void tandem_attention(const Attention* attention);
TANDEM_EXPORT void tandem_linear(const bf16* weight, Index columns, Index inner, const bf16* x,
                   Index x_stride, Index rows, const bf16* bias, const bf16* residual,
                   bf16* out);
TANDEM_EXPORT void tandem_linear_float32(const bf16* weight, Index columns, Index inner, const bf16* x,
                           Index x_stride, Index rows, const bf16* bias, float* out);
TANDEM_EXPORT void tandem_gate_up_silu(const bf16* weight, Index columns, Index inner, const bf16* x,
                         Index x_stride, Index rows, const bf16* bias, bf16* out);
TANDEM_EXPORT void tandem_split_linear(const std::uint8_t* weight, Index columns, Index inner, const bf16* x,
                         Index x_stride, Index rows, const bf16* bias,
                         const bf16* residual, bf16* out);
TANDEM_EXPORT void tandem_split_linear_float32(const std::uint8_t* weight, Index columns, Index inner,
                                 const bf16* x, Index x_stride, Index rows,
                                 const bf16* bias, float* out);
TANDEM_EXPORT void tandem_split_gate_up_silu(const std::uint8_t* weight, Index columns, Index inner,
                               const bf16* x, Index x_stride, Index rows,
                               const bf16* bias, bf16* out);
