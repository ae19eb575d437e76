// From a checkpoint's stored rows to the layout that products read, in one pass: 64 rows at a time are widened, a tile
// of columns that stays in the cache, and written in pairs.
#include <algorithm>

#include "pool.h"
#include "widen.h"

namespace tandem {
namespace {

constexpr Index kTile = 256;                 // columns of a tile; blocks of all formats divide it
constexpr Index kNarrow = kTile + 2 * 40;    // elements from one row of a tile to the next, where blocks are short
constexpr Index kWide = kTile + 2 * kTile;   // and where a tile cuts blocks of 256 at both ends

// Rows of a stored matrix, in the order in which they are wanted. `PackPart` of packing.py.
struct Part {
    const Byte* rows;
    Index type;
    Index row_bytes;
    Index first_row;
    Index num_rows;
    Index first_column;
    Index half;  // rows of half a head, where both halves are stored interleaved; 0: as they are
};

Index stored_row(const Part& part, Index row) {
    if (!part.half) return row;
    const Index head = row / (2 * part.half), within = row % (2 * part.half);
    return head * 2 * part.half + within % part.half * 2 + within / part.half;
}

struct Matrix {
    const Part* parts;
    Index num_parts;
    Index num_rows;
    Index columns;
    Index stride;  // of a tile's rows

    Matrix(const Part* parts, Index num_parts, Index columns)
        : parts(parts), num_parts(num_parts), num_rows(0), columns(columns), stride(kNarrow) {
        for (const Part* part = parts; part < parts + num_parts; ++part) {
            num_rows += part->num_rows;
            if (find_format(part->type)->elements == kTile && part->first_column % kTile) stride = kWide;
        }
    }

    // Widens columns `first` to `first + width` of the rows from `row` on into `tile`; `at[i]` is where row i begins.
    void fill(Index row, Index count, Index first, Index width, bf16* tile, const bf16** at) const {
        const Part* part = parts;
        while (row >= part->num_rows) row -= part++->num_rows;
        for (Index i = 0; i < count; ++i, ++row) {
            while (row >= part->num_rows) row -= part++->num_rows;
            const Format& format = *find_format(part->type);
            const Index begin = part->first_column + first, block = begin / format.elements;
            const Index end = (begin + width + format.elements - 1) / format.elements;
            const Byte* from = part->rows + stored_row(*part, part->first_row + row) * part->row_bytes;
            format.widen(from + block * format.bytes, end - block, tile + i * stride);
            at[i] = tile + i * stride + (begin - block * format.elements);
        }
    }
};

// 16 columns of 16 rows of pairs, turned around: out[c] has pair c of all rows.
inline void turn(const bf16* const* rows, Index first, __m512i (&out)[16]) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i] + first);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        const __m512i even = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88), odd = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
        const __m512i even2 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
        const __m512i odd2 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
        out[i] = _mm512_shuffle_i32x4(even, even2, 0x88);
        out[4 + i] = _mm512_shuffle_i32x4(odd, odd2, 0x88);
        out[8 + i] = _mm512_shuffle_i32x4(even, even2, 0xdd);
        out[12 + i] = _mm512_shuffle_i32x4(odd, odd2, 0xdd);
    }
}

void pack_block(const Matrix& matrix, Index block, bf16* out) {
    alignas(64) bf16 tile[kColumns * kWide];
    alignas(64) static const bf16 zeros[kTile] = {};
    const bf16* at[kColumns];
    const Index row = block * kColumns, count = std::min(kColumns, matrix.num_rows - row);
    out += row * matrix.columns;
    for (Index first = 0; first < matrix.columns; first += kTile) {
        const Index width = std::min(kTile, matrix.columns - first), pairs = width / 2;
        matrix.fill(row, count, first, width, tile, at);
        std::fill(at + count, at + kColumns, zeros);
        for (Index pair = 0; pair < pairs; pair += kLanes) {
            bf16* line = out + (first / 2 + pair) * 2 * kColumns;
            for (Index side = 0; side < kColumns; side += kLanes) {
                __m512i turned[kLanes];
                turn(at + side, 2 * pair, turned);
                for (Index i = 0; i < std::min(kLanes, pairs - pair); ++i)
                    _mm512_storeu_si512(line + i * 2 * kColumns + 2 * side, turned[i]);
            }
        }
    }
}

void widen_block(const Matrix& matrix, Index block, bf16* out) {
    alignas(64) bf16 tile[kColumns * kWide];
    const bf16* at[kColumns];
    const Index row = block * kColumns, count = std::min(kColumns, matrix.num_rows - row);
    for (Index first = 0; first < matrix.columns; first += kTile) {
        const Index width = std::min(kTile, matrix.columns - first);
        matrix.fill(row, count, first, width, tile, at);
        for (Index i = 0; i < count; ++i)
            std::memcpy(out + (row + i) * matrix.columns + first, at[i], width * sizeof(bf16));
    }
}

}  // namespace
}  // namespace tandem

using namespace tandem;

// Elements of a block of GGML's type, 0 where it cannot be widened; its bytes to `bytes`.
TANDEM_EXPORT Index tandem_format(Index type, Index* bytes) {
    const Format* format = find_format(type);
    *bytes = format ? format->bytes : 0;
    return format ? format->elements : 0;
}

// The rows of all parts, one part after the other, to the layout of linear.cpp: `columns` is even.
TANDEM_EXPORT void tandem_pack(const Part* parts, Index num_parts, Index columns, bf16* out) {
    const Matrix matrix(parts, num_parts, columns);
    for_each_item((matrix.num_rows + kColumns - 1) / kColumns, [&](Index block) { pack_block(matrix, block, out); });
}

// The same to plain rows `[N, columns]`.
TANDEM_EXPORT void tandem_widen(const Part* parts, Index num_parts, Index columns, bf16* out) {
    const Matrix matrix(parts, num_parts, columns);
    for_each_item((matrix.num_rows + kColumns - 1) / kColumns, [&](Index block) { widen_block(matrix, block, out); });
}
