// Products with a packed weight, whatever its form. Of few rows they are bound by reading it: each block of columns is
// read once. Of many they are bound by arithmetic: six rows of 64 columns are summed in registers.
//
// A form has `begin(block, more)`, the reader that an item's first rows use, `more` telling whether others follow, and
// that reader's `again()`, the one for those. A reader's `multiply<R>(sums, rows, row_stride, block, second)` adds R rows
// times a block of columns, pair by pair in order, so all forms give the same bits; `second` is the other of two blocks.
#pragma once

#include <algorithm>

#include "pool.h"

namespace tandem {

constexpr int kMaxRows = 6;                 // rows of 64 columns whose sums fit the registers beside the weights
constexpr Index kCachedElements = 1 << 17;  // of the rows, a quarter of a MiB

template <class Out>
struct Product {
    Index columns;  // N
    Index inner;    // K
    const bf16* rows;
    Index row_stride;
    const bf16* bias;      // [N] or null
    const bf16* residual;  // as `out`, or null
    Out* out;              // [rows, N]
};

template <class Out, class Reader, int R>
void columns_of(const Product<Out>& p, const Reader& weight, Index block, Index row) {
    __m512 sums[R][4];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < 4; ++v) sums[r][v] = _mm512_setzero_ps();
    weight.template multiply<R>(sums, p.rows + row * p.row_stride, p.row_stride, block, false);
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
template <class Out, class Reader, int R>
void gated_columns_of(const Product<Out>& p, const Reader& weight, Index block, Index row) {
    __m512 gate[R][4], up[R][4];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < 4; ++v) gate[r][v] = up[r][v] = _mm512_setzero_ps();
    const bf16* rows = p.rows + row * p.row_stride;
    weight.template multiply<R>(gate, rows, p.row_stride, block, false);
    weight.template multiply<R>(up, rows, p.row_stride, p.columns / kColumns + block, true);
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

template <class Out, class Reader>
using Step = void (*)(const Product<Out>&, const Reader&, Index block, Index row);

template <class Out, class Reader>
struct Plainly {
    static constexpr Step<Out, Reader> steps[kMaxRows + 1] = {
        nullptr,                    columns_of<Out, Reader, 1>, columns_of<Out, Reader, 2>, columns_of<Out, Reader, 3>,
        columns_of<Out, Reader, 4>, columns_of<Out, Reader, 5>, columns_of<Out, Reader, 6>};
};

template <class Out, class Reader>
struct Gated {
    static constexpr Step<Out, Reader> steps[kMaxRows + 1] = {nullptr,
                                                              gated_columns_of<Out, Reader, 1>,
                                                              gated_columns_of<Out, Reader, 2>,
                                                              gated_columns_of<Out, Reader, 3>,
                                                              gated_columns_of<Out, Reader, 4>,
                                                              gated_columns_of<Out, Reader, 5>,
                                                              gated_columns_of<Out, Reader, 6>};
};

// An item is a block of columns with as many rows as stay in a core's cache. Its first rows bring the weights into the
// cache, the others find them there.
template <template <class, class> class Kind, class Out, class Form>
void run(const Product<Out>& product, Index num_rows, const Form& form) {
    const Index blocks = (product.columns + kColumns - 1) / kColumns;
    const Index most = std::max<Index>(kMaxRows, kCachedElements / product.inner / kMaxRows * kMaxRows);
    const Index chunks = (num_rows + most - 1) / most;
    for_each_item(chunks * blocks, [&](Index item) {
        const Index block = item % blocks, first = item / blocks * most, last = std::min(num_rows, first + most);
        const auto reader = form.begin(last - first > kMaxRows);
        Kind<Out, std::decay_t<decltype(reader)>>::steps[std::min<Index>(kMaxRows, last - first)](product, reader, block,
                                                                                                  first);
        const auto later = reader.again();
        for (Index row = first + kMaxRows; row < last; row += kMaxRows)
            Kind<Out, std::decay_t<decltype(later)>>::steps[std::min<Index>(kMaxRows, last - row)](product, later, block,
                                                                                                  row);
    });
}

}  // namespace tandem
