// Products with a packed weight. Of few rows they are bound by reading it: each block of columns is read once. Of many
// they are bound by arithmetic: six rows of 64 columns are summed in registers.
//
// Weights are in the layout that oneDNN chooses for these types, [N / 64][K / 2][64][2], N padded with zeros to a
// multiple of 64, so both read the same memory.
#include <algorithm>

#include "pool.h"

namespace tandem {
namespace {

constexpr int kMaxRows = 6;      // rows of 64 columns whose sums fit the registers beside the weights
constexpr Index kAhead = 4096;   // bytes; measured: less leaves the memory waiting
constexpr Index kNone = 0;
constexpr Index kCachedElements = 1 << 17;  // of the rows, a quarter of a MiB

template <class Out>
struct Product {
    const bf16* weight;
    Index columns;  // N
    Index inner;    // K
    const bf16* rows;
    Index row_stride;
    const bf16* bias;      // [N] or null
    const bf16* residual;  // as `out`, or null
    Out* out;              // [rows, N]
};

template <class Out, int R, Index ahead>
void columns_of(const Product<Out>& p, Index block, Index row) {
    __m512 sums[R][4];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < 4; ++v) sums[r][v] = _mm512_setzero_ps();
    multiply<R, 4, ahead>(sums, p.rows + row * p.row_stride, p.row_stride, p.weight + block * kColumns * p.inner,
                          2 * kColumns, p.inner / 2);
    for (int v = 0; v < 4; ++v) {
        const Index column = block * kColumns + v * kLanes;
        const __mmask16 mask = first_lanes(p.columns - column);
        if (!mask) break;
        const __m512 bias = p.bias ? load(p.bias + column, mask) : _mm512_setzero_ps();
        for (int r = 0; r < R; ++r) {
            const Index at = (row + r) * p.columns + column;
            __m512 sum = _mm512_add_ps(sums[r][v], bias);
            if (p.residual) sum = _mm512_add_ps(sum, load(p.residual + at, mask));
            store(p.out + at, sum, mask);
        }
    }
}

// Gate and up stand one after the other in the weight, `columns` rows each.
template <int R, Index ahead>
void gated_columns_of(const Product<bf16>& p, Index block, Index row) {
    __m512 gate[R][4], up[R][4];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < 4; ++v) gate[r][v] = up[r][v] = _mm512_setzero_ps();
    const bf16* rows = p.rows + row * p.row_stride;
    const Index up_block = p.columns / kColumns + block;
    multiply<R, 4, ahead>(gate, rows, p.row_stride, p.weight + block * kColumns * p.inner, 2 * kColumns, p.inner / 2);
    multiply<R, 4, ahead>(up, rows, p.row_stride, p.weight + up_block * kColumns * p.inner, 2 * kColumns, p.inner / 2);
    for (int v = 0; v < 4; ++v) {
        const Index column = block * kColumns + v * kLanes;
        for (int r = 0; r < R; ++r) {
            __m512 first = gate[r][v], second = up[r][v];
            if (p.bias) {
                first = _mm512_add_ps(first, load(p.bias + column));
                second = _mm512_add_ps(second, load(p.bias + p.columns + column));
            }
            store(p.out + (row + r) * p.columns + column, _mm512_mul_ps(silu(first), second));
        }
    }
}

template <class Out>
using Step = void (*)(const Product<Out>&, Index block, Index row);

template <class Out, Index ahead>
constexpr Step<Out> kPlain[kMaxRows + 1] = {nullptr,
                                            columns_of<Out, 1, ahead>,
                                            columns_of<Out, 2, ahead>,
                                            columns_of<Out, 3, ahead>,
                                            columns_of<Out, 4, ahead>,
                                            columns_of<Out, 5, ahead>,
                                            columns_of<Out, 6, ahead>};

template <Index ahead>
constexpr Step<bf16> kGated[kMaxRows + 1] = {nullptr,
                                             gated_columns_of<1, ahead>,
                                             gated_columns_of<2, ahead>,
                                             gated_columns_of<3, ahead>,
                                             gated_columns_of<4, ahead>,
                                             gated_columns_of<5, ahead>,
                                             gated_columns_of<6, ahead>};

// An item is a block of columns with as many rows as stay in a core's cache. Its first rows bring the weights into the
// cache, the others find them there.
template <class Out>
void run(const Product<Out>& product, Index num_rows, const Step<Out>* cold, const Step<Out>* warm) {
    const Index blocks = (product.columns + kColumns - 1) / kColumns;
    const Index most = std::max<Index>(kMaxRows, kCachedElements / product.inner / kMaxRows * kMaxRows);
    const Index chunks = (num_rows + most - 1) / most;
    for_each_item(chunks * blocks, [&](Index item) {
        const Index block = item % blocks, last = std::min(num_rows, (item / blocks + 1) * most);
        const Step<Out>* step = cold;
        for (Index row = item / blocks * most; row < last; row += kMaxRows, step = warm)
            step[std::min<Index>(kMaxRows, last - row)](product, block, row);
    });
}

}  // namespace
}  // namespace tandem

using namespace tandem;

// out [rows, N] = x [rows, K] W^T + bias + residual
TANDEM_EXPORT void tandem_linear(const bf16* weight, Index columns, Index inner, const bf16* x, Index x_stride,
                                 Index rows, const bf16* bias, const bf16* residual, bf16* out) {
    run<bf16>({weight, columns, inner, x, x_stride, bias, residual, out}, rows, kPlain<bf16, kAhead>,
              kPlain<bf16, kNone>);
}

// The same without a residual, its sums left as they are.
TANDEM_EXPORT void tandem_linear_float32(const bf16* weight, Index columns, Index inner, const bf16* x, Index x_stride,
                                         Index rows, const bf16* bias, float* out) {
    run<float>({weight, columns, inner, x, x_stride, bias, nullptr, out}, rows, kPlain<float, kAhead>,
               kPlain<float, kNone>);
}

// out [rows, I] = silu(x Wg^T + bg) * (x Wu^T + bu), the weight being [2 I, K], gate first, I a multiple of 64
TANDEM_EXPORT void tandem_gate_up_silu(const bf16* weight, Index columns, Index inner, const bf16* x, Index x_stride,
                                       Index rows, const bf16* bias, bf16* out) {
    run<bf16>({weight, columns, inner, x, x_stride, bias, nullptr, out}, rows, kGated<kAhead>, kGated<kNone>);
}
