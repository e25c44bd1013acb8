// Products in int8, of inputs and weights that are multiples of a row's and of a column's scale: sums are exact.
#pragma once

#include "structures.h"

namespace sarathi {

constexpr int64_t QUAD = 4;    // inputs that lie together for each column, as one instruction takes them
constexpr int64_t BYTES = 64;  // to which the inputs of a packed weight are rounded up: those of one AMX tile

// `dot` adds to each column's sum the products of four inputs and four weights. Where it takes unsigned inputs these are
// 128 too large, and the sums begin as much too small.
#if defined(__AVX512VNNI__)
typedef int32_t Ints __attribute__((vector_size(64)));
constexpr bool IS_UNSIGNED = true;
inline Ints dot(Ints sum, Ints inputs, Ints weights) {
    return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(inputs),
                                                      reinterpret_cast<__m512i>(weights)));
}
#elif defined(__AVX2__)
typedef int32_t Ints __attribute__((vector_size(32)));
#ifdef __AVXVNNI__
constexpr bool IS_UNSIGNED = true;
inline Ints dot(Ints sum, Ints inputs, Ints weights) {
    return reinterpret_cast<Ints>(_mm256_dpbusd_avx_epi32(
        reinterpret_cast<__m256i>(sum), reinterpret_cast<__m256i>(inputs), reinterpret_cast<__m256i>(weights)));
}
#else
constexpr bool IS_UNSIGNED = false;
inline Ints dot(Ints sum, Ints inputs, Ints weights) {  // |x| times w with x's sign: two of them fit into 16 bits
    const __m256i x = reinterpret_cast<__m256i>(inputs), w = reinterpret_cast<__m256i>(weights);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(x), _mm256_sign_epi8(w, x));
    return sum + reinterpret_cast<Ints>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif
#else
using Ints = int32x4_t;
constexpr bool IS_UNSIGNED = false;
inline Ints dot(Ints sum, Ints inputs, Ints weights) {
    const int8x16_t x = vreinterpretq_s8_s32(inputs), w = vreinterpretq_s8_s32(weights);
#ifdef __ARM_FEATURE_DOTPROD
    return vdotq_s32(sum, w, x);
#else
    const int16x8_t low = vmull_s8(vget_low_s8(x), vget_low_s8(w)), high = vmull_high_s8(x, w);
    return sum + vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#endif
}
#endif

// A head, or a row of inputs, in 8 bits: the multiples of the scale that is returned, which is no number if an entry is not finite.
template <class T>
float quantize_row(const float* from, int64_t size, T* to) {
    Vector most = broadcast(0.0f), poison = broadcast(0.0f);
    for (int64_t i = 0; i < size; i += LANES) {
        const Vector x = load(from + i, lanes(size - i));
        most = max(max(x, -x), most);
        poison = fma(x, broadcast(0.0f), poison);
    }
    const float scale = reduce_max(most) / LARGEST<T> + reduce_add(poison);
    const Vector inverse = broadcast(scale > 0 ? 1 / scale : 0.0f);
    for (int64_t i = 0; i < size; i += LANES) {
        const Mask mask = lanes(size - i);
        store(to + i, load(from + i, mask) * inverse, mask);
    }
    return scale;
}

// In its register: GCC may read weights again for every row instead, at half the speed.
inline void stay([[maybe_unused]] Ints& x) {
#ifdef __AVX2__
    asm("" : "+v"(x));
#endif
}

inline Ints load_ints(const void* from) {
    Ints ints;
    std::memcpy(&ints, from, sizeof ints);
    return ints;
}

// M rows of inputs, `stride` bytes apart, times a packed panel [k / 4, 32, 4]: added to `start`, of 32 columns.
template <int M>
inline void multiply_quads(const int8_t* a, int64_t stride, const int8_t* b, int64_t k, const int32_t* start, int32_t* out) {
    constexpr int WIDE = sizeof(Ints) / sizeof(int32_t), PARTS = WIDE == LANES ? 2 : LANES / WIDE;
    constexpr int64_t FAR = 16 * PANEL * QUAD;  // ahead of what is read
    for (int64_t column = 0; column < PANEL; column += PARTS * WIDE) {
        Ints sum[M][PARTS];
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; ++part) {
                sum[m][part] = load_ints(start + column + part * WIDE);
            }
        }
        const int8_t* quads = b + column * QUAD;
        for (int64_t i = 0; i < k; i += QUAD, quads += PANEL * QUAD) {
            Ints weights[PARTS];
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; ++part) {
                weights[part] = load_ints(quads + part * WIDE * QUAD);
                __builtin_prefetch(quads + FAR + part * WIDE * QUAD);
                if constexpr (M * PARTS < 16 || WIDE < LANES) {
                    stay(weights[part]);
                }
            }
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) {
                int32_t x;
                std::memcpy(&x, a + m * stride + i, sizeof x);
#pragma GCC unroll 4
                for (int part = 0; part < PARTS; ++part) {
                    sum[m][part] = dot(sum[m][part], Ints{} + x, weights[part]);
                }
            }
        }
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; ++part) {
                std::memcpy(out + m * PANEL + column + part * WIDE, &sum[m][part], sizeof(Ints));
            }
        }
    }
}

// Rows of inputs, `stride` bytes apart as their scales are, times a panel of the weight: 32 sums each.
inline void multiply_int8(const int8_t* a, int64_t stride, const float* scales, const Linear& linear, int64_t panel,
                          int64_t rows, float* sums) {
    const int64_t k = (linear.in_features + BYTES - 1) / BYTES * BYTES, parts = (rows + ROWS - 1) / ROWS;
    const int8_t* weight = static_cast<const int8_t*>(linear.weight) + panel * PANEL * k;
    alignas(64) int32_t start[PANEL], ints[ROWS * PANEL];
    for (int64_t column = 0; column < PANEL; ++column) {
        start[column] = IS_UNSIGNED ? -128 * linear.sums[panel * PANEL + column] : 0;
    }
    for (int64_t part = 0, row = 0; part < parts; ++part) {
        const int64_t end = (part + 1) * rows / parts;
        with_rows<ROWS>(end - row, [&]<int M>() { multiply_quads<M>(a + row * stride, stride, weight, k, start, ints); });
        for (const int32_t* of_row = ints; row < end; ++row, of_row += PANEL) {
            const float scale = scales[row * stride / static_cast<int64_t>(sizeof(float))];
            for (int64_t column = 0; column < PANEL; ++column) {
                const float sum = static_cast<float>(of_row[column]);
                sums[row * PANEL + column] = sum * scale * linear.scales[panel * PANEL + column];
            }
        }
    }
}

}  // namespace sarathi
