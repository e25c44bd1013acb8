// Sixteen floats at a time: conversions, exponentials, and the small matrix products that everything is made of.
#pragma once

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VL__) || !defined(__AVX512DQ__)
#error "no AVX512"
#endif

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace sarathi {

using bf16 = uint16_t;
constexpr int64_t LANES = 16;
constexpr int64_t PANEL = 32;  // columns of a packed weight that are computed together
constexpr int64_t ROWS = 12;   // of a product kept in registers: 24 sums, two weights, one input
constexpr int64_t KBLOCK = 32;  // inputs that one AMX tile holds

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

inline void store(bf16* to, __m512 x, __mmask16 mask = 0xFFFF) { _mm256_mask_storeu_epi16(to, mask, to_bf16(x)); }

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

// out[m][0..32) = sum over k of a[m row_stride + k k_stride] * b[k][0..32), added to what is there if `Accumulates`.
template <int M, bool Accumulates>
inline void multiply(const float* a, int64_t row_stride, int64_t k_stride, const float* b, int64_t k, float* out) {
    __m512 sum[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
        sum[m][0] = Accumulates ? load(out + m * PANEL) : _mm512_setzero_ps();
        sum[m][1] = Accumulates ? load(out + m * PANEL + LANES) : _mm512_setzero_ps();
    }
    for (int64_t i = 0; i < k; ++i, b += PANEL, a += k_stride) {
        const __m512 left = _mm512_loadu_ps(b), right = _mm512_loadu_ps(b + LANES);
        _mm_prefetch(reinterpret_cast<const char*>(b + 16 * PANEL), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(b + 16 * PANEL + LANES), _MM_HINT_T0);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            const __m512 x = _mm512_set1_ps(a[m * row_stride]);
            sum[m][0] = _mm512_fmadd_ps(x, left, sum[m][0]);
            sum[m][1] = _mm512_fmadd_ps(x, right, sum[m][1]);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
        store(out + m * PANEL, sum[m][0]);
        store(out + m * PANEL + LANES, sum[m][1]);
    }
}

// The same with weights of bfloat16: pairs of inputs lie together, each pair for 16 columns (see `packing.py`).
template <int M>
inline void multiply_bf16(const float* a, int64_t row_stride, const bf16* b, int64_t k, float* out) {
    __m512 sum[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
        sum[m][0] = sum[m][1] = _mm512_setzero_ps();
    }
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
    for (int64_t i = 0; i < k; i += 2) {
        const bf16* pairs = b + i / KBLOCK * KBLOCK * PANEL + i % KBLOCK * LANES;
        const __m512i left = _mm512_loadu_si512(pairs), right = _mm512_loadu_si512(pairs + KBLOCK * LANES);
        const __m512 left0 = _mm512_castsi512_ps(_mm512_slli_epi32(left, 16));
        const __m512 left1 = _mm512_castsi512_ps(_mm512_and_epi32(left, high));
        const __m512 right0 = _mm512_castsi512_ps(_mm512_slli_epi32(right, 16));
        const __m512 right1 = _mm512_castsi512_ps(_mm512_and_epi32(right, high));
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            const __m512 x0 = _mm512_set1_ps(a[m * row_stride + i]), x1 = _mm512_set1_ps(a[m * row_stride + i + 1]);
            sum[m][0] = _mm512_fmadd_ps(x1, left1, _mm512_fmadd_ps(x0, left0, sum[m][0]));
            sum[m][1] = _mm512_fmadd_ps(x1, right1, _mm512_fmadd_ps(x0, right0, sum[m][1]));
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
        store(out + m * PANEL, sum[m][0]);
        store(out + m * PANEL + LANES, sum[m][1]);
    }
}

#ifdef __AMX_BF16__
constexpr bool HAS_AMX = true;

// All eight tiles hold 16 rows of 64 bytes; whoever multiplies with them says so first, on its own thread.
inline void begin_tiles() {
    alignas(64) struct {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    _tile_loadconfig(&config);
}

inline void end_tiles() { _tile_release(); }

// Two rows of two tiles: reads 32 rows of `a`, or 16 if no more are wanted, whether or not they mean anything.
inline void multiply_tiles(const bf16* a, int64_t row_stride, const bf16* b, int64_t k, int64_t rows, float* out) {
    constexpr int64_t TILE = LANES * KBLOCK;
    const int64_t bytes = row_stride * 2;
    _tile_zero(0);
    _tile_zero(1);
    if (rows <= 16) {
        for (int64_t i = 0; i < k; i += KBLOCK, b += 2 * TILE) {
            for (int64_t line = 0; line < 2 * TILE; line += 32) {
                _mm_prefetch(reinterpret_cast<const char*>(b + 8 * TILE + line), _MM_HINT_T0);
            }
            _tile_loadd(4, a + i, bytes);
            _tile_loadd(6, b, 64);
            _tile_loadd(7, b + TILE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
    } else {
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t i = 0; i < k; i += KBLOCK, b += 2 * TILE) {
            _tile_loadd(4, a + i, bytes);
            _tile_loadd(6, b, 64);
            _tile_loadd(7, b + TILE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, a + 16 * row_stride + i, bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, out + 16 * PANEL, PANEL * 4);
        _tile_stored(3, out + 16 * PANEL + LANES, PANEL * 4);
    }
    _tile_stored(0, out, PANEL * 4);
    _tile_stored(1, out + LANES, PANEL * 4);
}
#else
constexpr bool HAS_AMX = false;
inline void begin_tiles() {}
inline void end_tiles() {}
inline void multiply_tiles(const bf16*, int64_t, const bf16*, int64_t, int64_t, float*) {}
#endif

// Calls a template with the number of rows as its constant, 1 to ROWS.
template <int M, class Call>
inline void with_rows(int64_t rows, Call&& call) {
    if constexpr (M > 1) {
        if (rows < M) {
            return with_rows<M - 1>(rows, call);
        }
    }
    call.template operator()<M>();
}

// `rows` of a product, as many at a time as registers hold, in parts as equal as can be.
template <bool Accumulates>
inline void multiply_rows(const float* a, int64_t row_stride, int64_t k_stride, const float* b, int64_t k, int64_t rows,
                          float* out) {
    const int64_t parts = (rows + ROWS - 1) / ROWS;
    for (int64_t part = 0, row = 0; part < parts; ++part) {
        const int64_t end = (part + 1) * rows / parts;
        with_rows<ROWS>(end - row, [&]<int M>() {
            multiply<M, Accumulates>(a + row * row_stride, row_stride, k_stride, b, k, out + row * PANEL);
        });
        row = end;
    }
}

inline void multiply_rows_bf16(const float* a, int64_t row_stride, const bf16* b, int64_t k, int64_t rows, float* out) {
    const int64_t parts = (rows + ROWS - 1) / ROWS;
    for (int64_t part = 0, row = 0; part < parts; ++part) {
        const int64_t end = (part + 1) * rows / parts;
        with_rows<ROWS>(end - row, [&]<int M>() {
            multiply_bf16<M>(a + row * row_stride, row_stride, b, k, out + row * PANEL);
        });
        row = end;
    }
}

}  // namespace sarathi
