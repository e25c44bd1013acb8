// A vector is one register of AVX512; a mask is a separate one.
#pragma once

#include <immintrin.h>

namespace sarathi {

using Part = __m512;
using Vector = Part;
using Mask = __mmask16;
typedef uint32_t PartBits __attribute__((vector_size(64)));

constexpr int SUMS = 24;  // vectors of a product's results kept in registers, beside two weights and one input
constexpr int ROWS = 12;  // of a product that are computed together

inline Mask lanes(int64_t count) {
    return count >= LANES ? 0xFFFF : count <= 0 ? 0 : static_cast<Mask>((1u << count) - 1);
}
inline int64_t count_of(Mask mask) { return __builtin_popcount(mask); }

inline Vector broadcast(float x) { return _mm512_set1_ps(x); }
inline Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
inline Vector max(Vector a, Vector b) { return _mm512_max_ps(a, b); }  // the second if one is NaN
inline Vector min(Vector a, Vector b) { return _mm512_min_ps(a, b); }
inline Vector nearest(Vector x) { return _mm512_roundscale_ps(x, 0); }  // whole number
inline Vector scale(Vector x, Vector n) { return _mm512_scalef_ps(x, n); }  // x 2^n
inline Vector keep(Vector x, Mask mask) { return _mm512_maskz_mov_ps(mask, x); }  // zero elsewhere
inline float reduce_add(Vector x) { return _mm512_reduce_add_ps(x); }
inline float reduce_max(Vector x) { return _mm512_reduce_max_ps(x); }
inline uint32_t nan_lanes(Vector x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
inline bool exceeds(Vector a, Vector b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ); }  // anywhere

// What is left of x beside a whole number.
inline Vector fraction(Vector x, Vector& whole) {
    const Vector r = _mm512_reduce_ps(x, 0x08);  // to the nearest
    whole = x - r;
    return r;
}

inline Vector load(const float* from, Mask mask = 0xFFFF) { return _mm512_maskz_loadu_ps(mask, from); }
inline Vector load(const float* from, Mask mask, Vector elsewhere) { return _mm512_mask_loadu_ps(elsewhere, mask, from); }

inline Vector load(const bf16* from, Mask mask = 0xFFFF) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

inline void store(float* to, Vector x, Mask mask = 0xFFFF) { _mm512_mask_storeu_ps(to, mask, x); }

inline __m256i to_bf16(Vector x) {
#ifdef __AVX512BF16__
    return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));
#else
    return _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(bf16_bits(reinterpret_cast<PartBits>(x))));
#endif
}

inline void store(bf16* to, Vector x, Mask mask = 0xFFFF) { _mm256_mask_storeu_epi16(to, mask, to_bf16(x)); }

// The sum of each of four vectors, the first `count` of which are stored.
inline void store_sums(float* to, const Vector (&x)[4], int64_t count) {
    const __m512 first = _mm512_unpacklo_ps(x[0], x[1]) + _mm512_unpackhi_ps(x[0], x[1]);
    const __m512 second = _mm512_unpacklo_ps(x[2], x[3]) + _mm512_unpackhi_ps(x[2], x[3]);
    const __m512d a = _mm512_castps_pd(first), b = _mm512_castps_pd(second);
    const __m512 all = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)) + _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    const __m256 halves = _mm512_castps512_ps256(all) + _mm512_extractf32x8_ps(all, 1);
    _mm_mask_storeu_ps(to, static_cast<__mmask8>(lanes(count)), _mm256_castps256_ps128(halves) + _mm256_extractf128_ps(halves, 1));
}

// Rows become columns.
inline void transpose(Vector (&x)[16]) {
    __m512d y[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {  // pairs of numbers
        y[i] = _mm512_castps_pd(_mm512_unpacklo_ps(x[i], x[i + 1]));
        y[i + 1] = _mm512_castps_pd(_mm512_unpackhi_ps(x[i], x[i + 1]));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {  // fours
        x[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(y[i], y[i + 2]));
        x[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(y[i], y[i + 2]));
        x[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(y[i + 1], y[i + 3]));
        x[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(y[i + 1], y[i + 3]));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // eights, then all; what is read here is not read again
        const Vector a = _mm512_shuffle_f32x4(x[i], x[i + 4], 0x88), b = _mm512_shuffle_f32x4(x[i], x[i + 4], 0xDD);
        const Vector c = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0x88);
        const Vector d = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0xDD);
        x[i] = _mm512_shuffle_f32x4(a, c, 0x88);
        x[i + 8] = _mm512_shuffle_f32x4(a, c, 0xDD);
        x[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
        x[i + 12] = _mm512_shuffle_f32x4(b, d, 0xDD);
    }
}

}  // namespace sarathi
