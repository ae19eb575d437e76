// A matrix of bfloat16 in 12 bits per weight, bit for bit.
//
// The high byte of a bfloat16 is its sign and seven of its exponent's eight bits. Of a trained matrix's 128 values of
// those seven, eight stand for all but about 1 in 7,000 weights: 4 bits, with the sign. The low byte stays as it is. What
// has none of the eight is written beside, and put in place as its pair of columns is decoded.
//
// Blocks and pairs are those of linear.cpp, [N / 64][K / 2][64][2]; the 128 weights of a pair are three cache lines: low
// bytes of the first 64, of the others, and codes, those of the first 64 in the low halves of bytes. Within 64 they lie as
// `vpunpck` takes them apart. A block has all that it takes to decode it, so blocks of several matrices of one width may
// stand below each other. `model/lossless/split.py` is the same in numpy; packed checkpoints have these bytes too. One
// piece of memory:
//
//     head      64 bytes
//     groups    [blocks][pairs][192]
//     values    [blocks][8]: the high byte of a code, without its sign
//     flags     [blocks][ceil(pairs / 64)] 64 bits: pairs with weights that are written beside
//     first     [blocks] 32 bits: where a block's begin
//     beside    32 bits each: value, place within the pair << 16, and the highest bit at a pair's last
#pragma once

#include "simd.h"

namespace tandem {

constexpr std::uint64_t kSplitMagic = 0x32'32'54'49'4c'50'53'54;  // "TSPLIT22"
constexpr Index kGroup = 192;
constexpr int kCodes = 8;

struct SplitHead {
    std::uint64_t magic;
    std::uint64_t is_split;  // 0: the packed bfloat16 follows as it is
    std::uint64_t size;
    std::uint64_t num_beside;
    std::uint8_t unused[32];
};
static_assert(sizeof(SplitHead) == 64);

// Where the parts of a matrix lie.
struct SplitPlaces {
    Index blocks, pairs, words, groups, values, flags, first, beside;

    SplitPlaces(Index columns, Index inner)
        : blocks((columns + kColumns - 1) / kColumns),
          pairs(inner / 2),
          words((pairs + 63) / 64),
          groups(sizeof(SplitHead)),
          values(groups + blocks * pairs * kGroup),
          flags(values + blocks * kCodes),
          first(flags + blocks * words * 8),
          beside(first + blocks * 4) {}
};

}  // namespace tandem
