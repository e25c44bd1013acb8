// Eight floats in a register of AVX2, with FMA and F16C.
#pragma once

#include <immintrin.h>

namespace sarathi {

typedef float Part __attribute__((vector_size(32)));
typedef uint32_t PartBits __attribute__((vector_size(32)));
typedef int32_t PartInts __attribute__((vector_size(32)));
typedef uint16_t Halves __attribute__((vector_size(16)));

inline Part repeat(float x) { return _mm256_set1_ps(x); }
inline Part fma(Part a, Part b, Part c) { return _mm256_fmadd_ps(a, b, c); }
inline Part max(Part a, Part b) { return _mm256_max_ps(a, b); }  // the second if one is NaN
inline Part min(Part a, Part b) { return _mm256_min_ps(a, b); }
inline Part nearest(Part x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline bool exceeds(Part a, Part b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NLE_UQ)); }  // anywhere

// The sum of each of four.
inline void add_each(Part a, Part b, Part c, Part d, float* to) {
    const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(to, _mm256_castps256_ps128(sums) + _mm256_extractf128_ps(sums, 1));
}

inline float reduce_add(Part x) {
    const __m128 fours = _mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1);
    const __m128 twos = fours + _mm_movehl_ps(fours, fours);
    return twos[0] + twos[1];
}

inline float reduce_max(Part x) {
    const __m128 fours = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 twos = _mm_max_ps(fours, _mm_movehl_ps(fours, fours));
    return std::max(twos[0], twos[1]);
}

inline __m128i load_bytes(const void* from) { return _mm_loadl_epi64(static_cast<const __m128i*>(from)); }

inline Part load_part(const float* from) { return _mm256_loadu_ps(from); }

inline Part load_part(const bf16* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

inline Part load_part(const int8_t* from) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_bytes(from))); }

inline Part load_part(const fp8* from) {
    const Halves half = fp8_as_half(reinterpret_cast<Halves>(_mm_cvtepu8_epi16(load_bytes(from))));
    return _mm256_cvtph_ps(reinterpret_cast<__m128i>(half)) * repeat(256.0f);
}

// Sixteen bits each, of numbers that fit.
inline __m128i narrow(PartBits x) {
    const __m256i bits = reinterpret_cast<__m256i>(x);
    return _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
}

inline void store_part(float* to, Part x) { _mm256_storeu_ps(to, x); }

inline void store_part(bf16* to, Part x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), narrow(bf16_bits(reinterpret_cast<PartBits>(x))));
}

inline void store_part(int8_t* to, Part x) {
    const __m256i whole = _mm256_cvtps_epi32(x);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(words, words));
}

inline void store_part(fp8* to, Part x) {
    const __m128i words = narrow(fp8_bits(reinterpret_cast<PartBits>(x * repeat(0x1p-120f))));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(words, words));
}

inline void transpose(Part (&x)[8]) {
    __m256 y[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {  // pairs of numbers
        y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
        y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {  // fours
        x[i] = _mm256_shuffle_ps(y[i], y[i + 2], 0x44);
        x[i + 1] = _mm256_shuffle_ps(y[i], y[i + 2], 0xEE);
        x[i + 2] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0x44);
        x[i + 3] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0xEE);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m256 a = x[i], b = x[i + 4];
        x[i] = _mm256_permute2f128_ps(a, b, 0x20);
        x[i + 4] = _mm256_permute2f128_ps(a, b, 0x31);
    }
}

}  // namespace sarathi

#include "simd_pair.h"
