#include "widen.h"

namespace tandem {
namespace {

// A product that the compiler does not fuse with the sum it goes into: the reference rounds in between.
inline __m512 times(__m512 a, __m512 b) {
    return _mm512_mul_round_ps(a, b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// To nearest even; what is not a number becomes 0xffff.
inline __m256i round_to_bf16(__m512 values) {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 no_number = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), no_number, _mm512_set1_epi32(-1)));
}

inline void put(bf16* to, __m512 values) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), round_to_bf16(values));
}

inline __m512 half(const Byte* from) {
    std::int16_t bits;
    std::memcpy(&bits, from, sizeof bits);
    return _mm512_cvtph_ps(_mm256_set1_epi16(bits));
}

inline std::uint32_t word(const Byte* from) {
    std::uint32_t bits;
    std::memcpy(&bits, from, sizeof bits);
    return bits;
}

inline __m128i bytes16(const Byte* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
inline __m128i low(__m128i bytes) { return _mm_and_si128(bytes, _mm_set1_epi8(15)); }
inline __m128i high(__m128i bytes) { return low(_mm_srli_epi16(bytes, 4)); }
inline __m128i fifth(__m128i bytes, std::uint32_t bits) {
    return _mm_or_si128(bytes, _mm_maskz_set1_epi8(__mmask16(bits), 16));
}
inline __m128i less(__m128i bytes, char offset) { return _mm_sub_epi8(bytes, _mm_set1_epi8(offset)); }
inline __m512 floats(__m128i signed_bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(signed_bytes)); }

struct Q4_0 {
    static constexpr Index kElements = 32, kBytes = 18;
    static void widen(const Byte* from, bf16* to) {
        const __m512 scale = half(from);
        const __m128i both = bytes16(from + 2);
        put(to, times(scale, floats(less(low(both), 8))));
        put(to + 16, times(scale, floats(less(high(both), 8))));
    }
};

struct Q4_1 {
    static constexpr Index kElements = 32, kBytes = 20;
    static void widen(const Byte* from, bf16* to) {
        const __m512 scale = half(from), least = half(from + 2);
        const __m128i both = bytes16(from + 4);
        put(to, _mm512_add_ps(times(scale, floats(low(both))), least));
        put(to + 16, _mm512_add_ps(times(scale, floats(high(both))), least));
    }
};

struct Q5_0 {
    static constexpr Index kElements = 32, kBytes = 22;
    static void widen(const Byte* from, bf16* to) {
        const __m512 scale = half(from);
        const std::uint32_t bits = word(from + 2);
        const __m128i both = bytes16(from + 6);
        put(to, times(scale, floats(less(fifth(low(both), bits), 16))));
        put(to + 16, times(scale, floats(less(fifth(high(both), bits >> 16), 16))));
    }
};

struct Q5_1 {
    static constexpr Index kElements = 32, kBytes = 24;
    static void widen(const Byte* from, bf16* to) {
        const __m512 scale = half(from), least = half(from + 2);
        const std::uint32_t bits = word(from + 4);
        const __m128i both = bytes16(from + 8);
        put(to, _mm512_add_ps(times(scale, floats(fifth(low(both), bits))), least));
        put(to + 16, _mm512_add_ps(times(scale, floats(fifth(high(both), bits >> 16))), least));
    }
};

struct Q8_0 {
    static constexpr Index kElements = 32, kBytes = 34;
    static void widen(const Byte* from, bf16* to) {
        const __m512 scale = half(from);
        put(to, times(floats(bytes16(from + 2)), scale));
        put(to + 16, times(floats(bytes16(from + 18)), scale));
    }
};

// Scales and minima of the eight runs of 32 in Q4_K and Q5_K, six bits each.
struct Runs {
    Byte scale[8], least[8];
    explicit Runs(const Byte* packed) {
        for (int i = 0; i < 4; ++i) {
            scale[i] = packed[i] & 63;
            least[i] = packed[4 + i] & 63;
            scale[4 + i] = (packed[8 + i] & 15) | (packed[i] >> 2 & 48);
            least[4 + i] = packed[8 + i] >> 4 | (packed[4 + i] >> 2 & 48);
        }
    }
};

// With a fifth bit for each value where `kFifth`.
template <bool kFifth>
struct RunsOf32 {
    static constexpr Index kElements = 256, kBytes = kFifth ? 176 : 144;
    static void widen(const Byte* from, bf16* to) {
        const __m512 scale = half(from), least = half(from + 2);
        const Runs runs(from + 4);
        const Byte *fifths = from + 16, *nibbles = from + (kFifth ? 48 : 16);
        for (int run = 0; run < 8; ++run) {
            const __m512 factor = times(scale, _mm512_set1_ps(runs.scale[run]));
            const __m512 offset = times(least, _mm512_set1_ps(runs.least[run]));
            for (int side = 0; side < 32; side += 16) {
                const __m128i both = bytes16(nibbles + run / 2 * 32 + side);
                __m128i values = run % 2 ? high(both) : low(both);
                if (kFifth)
                    values = fifth(values, _mm_test_epi8_mask(bytes16(fifths + side), _mm_set1_epi8(char(1 << run))));
                put(to + run * 32 + side, _mm512_sub_ps(times(factor, floats(values)), offset));
            }
        }
    }
};

struct Q6_K {
    static constexpr Index kElements = 256, kBytes = 210;
    static void widen(const Byte* from, bf16* to) {
        const Byte *fours = from, *twos = from + 128;
        const __m512 scale = half(from + 208);
        for (int run = 0; run < 16; ++run) {  // of 16 values
            const int part = run / 8, quarter = run % 8 / 2, side = run % 2 * 16;
            const __m128i both = bytes16(fours + part * 64 + quarter % 2 * 32 + side);
            const __m128i upper = _mm_srl_epi16(bytes16(twos + part * 32 + side), _mm_cvtsi32_si128(2 * quarter));
            const __m128i top = _mm_slli_epi16(_mm_and_si128(upper, _mm_set1_epi8(3)), 4);
            const __m128i values = less(_mm_or_si128(quarter < 2 ? low(both) : high(both), top), 32);
            const __m512 factor = times(scale, _mm512_set1_ps(static_cast<signed char>(from[192 + run])));
            put(to + run * 16, times(factor, floats(values)));
        }
    }
};

template <class Block>
void widen_blocks(const Byte* from, Index count, bf16* to) {
    for (Index block = 0; block < count; ++block)
        Block::widen(from + block * Block::kBytes, to + block * Block::kElements);
}

template <class Block>
constexpr Format kFormat = {Block::kElements, Block::kBytes, widen_blocks<Block>};

void widen_f32(const Byte* from, Index count, bf16* to) {
    for (Index at = 0; at < count; at += kLanes) {
        const __mmask16 mask = first_lanes(count - at);
        _mm256_mask_storeu_epi16(to + at, mask, round_to_bf16(_mm512_maskz_loadu_ps(mask, from + at * 4)));
    }
}

void widen_f16(const Byte* from, Index count, bf16* to) {
    for (Index at = 0; at < count; at += kLanes) {
        const __mmask16 mask = first_lanes(count - at);
        const __m512 values = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from + at * 2));
        _mm256_mask_storeu_epi16(to + at, mask, round_to_bf16(values));
    }
}

void copy_bf16(const Byte* from, Index count, bf16* to) { std::memcpy(to, from, count * sizeof(bf16)); }

constexpr Format kF32 = {1, 4, widen_f32}, kF16 = {1, 2, widen_f16}, kBF16 = {1, 2, copy_bf16};

}  // namespace

const Format* find_format(Index type) {
    switch (type) {
        case 0: return &kF32;
        case 1: return &kF16;
        case 2: return &kFormat<Q4_0>;
        case 3: return &kFormat<Q4_1>;
        case 6: return &kFormat<Q5_0>;
        case 7: return &kFormat<Q5_1>;
        case 8: return &kFormat<Q8_0>;
        case 12: return &kFormat<RunsOf32<false>>;
        case 13: return &kFormat<RunsOf32<true>>;
        case 14: return &kFormat<Q6_K>;
        case 30: return &kBF16;
        default: return nullptr;
    }
}

}  // namespace tandem
