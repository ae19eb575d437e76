// Products with a weight in the layout that oneDNN chooses for these types, [N / 64][K / 2][64][2], N padded with zeros
// to a multiple of 64, so both read the same memory.
#include "kernels.h"
#include "product.h"

namespace tandem {
namespace {

constexpr Index kAhead = 4096;  // bytes; measured: less leaves the memory waiting
constexpr Index kNone = 0;

template <Index ahead>
struct Plain {
    const bf16* weight;
    Index inner;

    Plain begin(bool) const { return *this; }
    Plain<kNone> again() const { return {weight, inner}; }

    template <int R>
    void multiply(__m512 (&sums)[R][4], const bf16* rows, Index row_stride, Index block, bool) const {
        tandem::multiply<R, 4, ahead>(sums, rows, row_stride, weight + block * kColumns * inner, 2 * kColumns, inner / 2);
    }
};

}  // namespace
}  // namespace tandem

using namespace tandem;

// out [rows, N] = x [rows, K] W^T + bias + residual
TANDEM_EXPORT void tandem_linear(const bf16* weight, Index columns, Index inner, const bf16* x, Index x_stride,
                                 Index rows, const bf16* bias, const bf16* residual, bf16* out) {
    run<Plainly>(Product<bf16>{columns, inner, x, x_stride, bias, residual, out}, rows, Plain<kAhead>{weight, inner});
}

// The same without a residual, its sums left as they are.
TANDEM_EXPORT void tandem_linear_float32(const bf16* weight, Index columns, Index inner, const bf16* x, Index x_stride,
                                         Index rows, const bf16* bias, float* out) {
    run<Plainly>(Product<float>{columns, inner, x, x_stride, bias, nullptr, out}, rows, Plain<kAhead>{weight, inner});
}

// out [rows, I] = silu(x Wg^T + bg) * (x Wu^T + bu), the weight being [2 I, K], gate first, I a multiple of 64
TANDEM_EXPORT void tandem_gate_up_silu(const bf16* weight, Index columns, Index inner, const bf16* x, Index x_stride,
                                       Index rows, const bf16* bias, bf16* out) {
    run<Gated>(Product<bf16>{columns, inner, x, x_stride, bias, nullptr, out}, rows, Plain<kAhead>{weight, inner});
}
