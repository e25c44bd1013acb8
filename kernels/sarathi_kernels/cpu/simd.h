// Sixteen floats at a time: loads, conversions, exponentials, transposes.
#pragma once

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VL__) || !defined(__AVX512DQ__)
#error "no AVX512"
#endif

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <new>
#include <type_traits>
#include <vector>

namespace sarathi {

using bf16 = uint16_t;
constexpr int64_t LANES = 16;

// Buffers begin at a cache line: a tile whose rows lie across two takes twice as long to read.
template <class T>
struct AtCacheLine {
    using value_type = T;
    T* allocate(std::size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(64))); }
    void deallocate(T* from, std::size_t) { ::operator delete(from, std::align_val_t(64)); }
    bool operator==(const AtCacheLine&) const { return true; }
};
using Floats = std::vector<float, AtCacheLine<float>>;

inline __mmask16 lanes(int64_t count) {
    return count >= LANES ? 0xFFFF : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
}

inline __m512 load(const float* from, __mmask16 mask = 0xFFFF) { return _mm512_maskz_loadu_ps(mask, from); }

inline __m512 load(const bf16* from, __mmask16 mask = 0xFFFF) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

inline void store(float* to, __m512 x, __mmask16 mask = 0xFFFF) { _mm512_mask_storeu_ps(to, mask, x); }

inline __m256i to_bf16(__m512 x) {
#ifdef __AVX512BF16__
    const __m256bh rounded = _mm512_cvtneps_pbh(x);
    __m256i bits;
    std::memcpy(&bits, &rounded, sizeof bits);
    return bits;
#else
    // To the nearest, ties to even; a NaN must not be rounded up to infinity's neighbour, zero.
    const __m512i raw = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(raw, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(raw, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(sum, nan, _mm512_set1_epi32(0x7FC00000)), 16));
#endif
}

// Of two vectors: a number of the first, one of the second, and so on.
inline __m512i to_bf16_pairs(__m512 first, __m512 second) {
#ifdef __AVX512BF16__
    const __m512bh rounded = _mm512_cvtne2ps_pbh(second, first);
    __m512i bits;
    std::memcpy(&bits, &rounded, sizeof bits);
    const __m512i of_both = _mm512_add_epi32(_mm512_set1_epi32(0x100000),
                                             _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,
                                                                                  12, 13, 14, 15),
                                                                _mm512_set1_epi32(0x10001)));
    return _mm512_permutexvar_epi16(of_both, bits);
#else
    const __m512i low = _mm512_cvtepu16_epi32(to_bf16(first)), high = _mm512_cvtepu16_epi32(to_bf16(second));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
#endif
}

inline void store(bf16* to, __m512 x, __mmask16 mask = 0xFFFF) { _mm256_mask_storeu_epi16(to, mask, to_bf16(x)); }

// The elements of an 8-bit cache: int8_t, and e4m3, which has four bits for its exponent, three behind the point and no
// infinity. What they are multiplied by, the scale of their head, lies elsewhere.
struct fp8 {
    uint8_t bits;
};

template <class T>
inline constexpr bool IS_SCALED = std::is_same_v<T, int8_t> || std::is_same_v<T, fp8>;
template <class T>
inline constexpr float LARGEST = std::is_same_v<T, fp8> ? 448.0f : 127.0f;  // what a head's largest entry becomes

inline __m512 load(const int8_t* from, __mmask16 mask = 0xFFFF) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, from)));
}

// Read as float16, whose exponent begins 8 below e4m3's: then all but the size is right.
inline __m512 load(const fp8* from, __mmask16 mask = 0xFFFF) {
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_maskz_loadu_epi8(mask, from));
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
    const __m256i rest = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7F)), 7);
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(sign, rest)), _mm512_set1_ps(256.0f));
}

inline void store(int8_t* to, __m512 x, __mmask16 mask = 0xFFFF) {
    _mm512_mask_cvtsepi32_storeu_epi8(to, mask, _mm512_cvtps_epi32(x));
}

// To the nearest, ties to even. At 2^-120 of its size, a float's exponent is e4m3's own, below the least one too.
inline void store(fp8* to, __m512 x, __mmask16 mask = 0xFFFF) {
    const __m512i raw = _mm512_castps_si512(_mm512_mul_ps(x, _mm512_set1_ps(0x1p-120f)));
    const __m512i size = _mm512_and_epi32(raw, _mm512_set1_epi32(0x7FFFFFFF));
    const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(size, 20), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(size, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFFF)));
    const __m512i bits = _mm512_min_epu32(_mm512_srli_epi32(sum, 20), _mm512_set1_epi32(0x7E));  // 448; beyond is NaN
    const __m512i sign = _mm512_and_epi32(_mm512_srli_epi32(raw, 24), _mm512_set1_epi32(0x80));
    _mm512_mask_cvtepi32_storeu_epi8(to, mask, _mm512_or_epi32(bits, sign));
}

// 2^x by a polynomial of so high a degree: 6 is about float's precision, 4 more than bfloat16's. NaN stays NaN, and what
// is below float's range, -infinity too, gives 0.
template <int Degree>
inline __m512 power_of_two(__m512 x) {
    constexpr int TO_NEAREST = 0x08;
    const __m512 r = _mm512_reduce_ps(x, TO_NEAREST);  // what is left of x beside a whole number
    constexpr float COEFFICIENTS[] = {1.0f,           0.693147181f,   0.240226507f,  0.0555041087f,
                                      0.00961812911f, 0.00133335581f, 0.000154035304f};  // (ln 2)^i / i!
    __m512 p = _mm512_set1_ps(COEFFICIENTS[Degree]);
#pragma GCC unroll 8
    for (int i = Degree - 1; i >= 0; --i) {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(COEFFICIENTS[i]));
    }
    return _mm512_scalef_ps(p, _mm512_sub_ps(x, r));
}

// e^x to about one unit in the last place; NaN stays NaN, and what is below float's range gives 0.
inline __m512 exponential(__m512 x) {
    x = _mm512_min_ps(_mm512_set1_ps(200.0f), _mm512_max_ps(_mm512_set1_ps(-200.0f), x));  // the second if NaN
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);  // ln 2 in two parts
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.0f / 5040);  // Taylor's series on |r| < 0.35
    for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    }
    return _mm512_scalef_ps(p, n);
}

// Rows become columns: of 16 vectors of 16 numbers of 32 bits.
inline void transpose(__m512i (&x)[16]) {
    __m512i y[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {  // pairs of numbers
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {  // fours
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // eights, then all
        const __m512i a = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88), b = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xDD);
        const __m512i c = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
        const __m512i d = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xDD);
        y[i] = _mm512_shuffle_i32x4(a, c, 0x88);
        y[i + 8] = _mm512_shuffle_i32x4(a, c, 0xDD);
        y[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
        y[i + 12] = _mm512_shuffle_i32x4(b, d, 0xDD);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
        x[i] = y[i];
    }
}

}  // namespace sarathi
