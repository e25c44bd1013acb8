// What is done to each row by itself: norms, rotary embedding.
#pragma once

#include <cmath>

#include "linear.h"

namespace sarathi {

// Calls `put(column, normed, mask)` for 16 columns after another; every part of the row is read before it is put.
template <class Put>
void norm_row(const float* x, int64_t size, const Norm& norm, Put&& put) {
    __m512 sum = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
    float mean = 0.0f;
    if (norm.is_layer) {
        for (int64_t i = 0; i < size; i += LANES) {
            sum = _mm512_add_ps(sum, load(x + i, lanes(size - i)));
        }
        mean = _mm512_reduce_add_ps(sum) / static_cast<float>(size);
    }
    for (int64_t i = 0; i < size; i += LANES) {
        const __mmask16 mask = lanes(size - i);
        const __m512 centred = _mm512_maskz_sub_ps(mask, load(x + i, mask), _mm512_set1_ps(mean));
        squares = _mm512_fmadd_ps(centred, centred, squares);
    }
    const float scale = 1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / static_cast<float>(size) + norm.epsilon);
    for (int64_t i = 0; i < size; i += LANES) {
        const __mmask16 mask = lanes(size - i);
        const __m512 centred = _mm512_sub_ps(load(x + i, mask), _mm512_set1_ps(mean));
        __m512 y = _mm512_mul_ps(_mm512_mul_ps(centred, _mm512_set1_ps(scale)), load(norm.weight + i, mask));
        y = norm.bias ? _mm512_add_ps(y, load(norm.bias + i, mask)) : y;
        put(i, y, mask);
    }
}

inline void norm_rows(const float* hidden, int64_t rows, int64_t size, const Norm& norm, Inputs& out) {
    pool->share((rows + 7) / 8, [&](int64_t task) {
        for (int64_t row = task * 8; row < std::min(rows, task * 8 + 8); ++row) {
            norm_row(hidden + row * size, size, norm,
                     [&](int64_t i, __m512 y, __mmask16 mask) { out.put(row, i, y, mask); });
        }
    });
}

inline void rotate(float* head, const float* cosines, const float* sines, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        const __mmask16 mask = lanes(half - i);
        const __m512 x = load(head + i, mask), y = load(head + half + i, mask);
        const __m512 c = load(cosines + i, mask), s = load(sines + i, mask);
        store(head + i, _mm512_fnmadd_ps(y, s, _mm512_mul_ps(x, c)), mask);
        store(head + half + i, _mm512_fmadd_ps(x, s, _mm512_mul_ps(y, c)), mask);
    }
}

// A head in 8 bits: the multiples of the scale that is returned, which is no number if an entry is not finite.
template <class T>
float quantize_row(const float* from, int64_t size, T* to) {
    __m512 most = _mm512_setzero_ps(), poison = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += LANES) {
        const __m512 x = load(from + i, lanes(size - i));
        most = _mm512_max_ps(_mm512_abs_ps(x), most);
        poison = _mm512_fmadd_ps(x, _mm512_setzero_ps(), poison);
    }
    const float scale = _mm512_reduce_max_ps(most) / LARGEST<T> + _mm512_reduce_add_ps(poison);
    const __m512 inverse = _mm512_set1_ps(scale > 0 ? 1 / scale : 0.0f);
    for (int64_t i = 0; i < size; i += LANES) {
        const __mmask16 mask = lanes(size - i);
        store(to + i, _mm512_mul_ps(load(from + i, mask), inverse), mask);
    }
    return scale;
}

template <class T>
void copy_row(const float* from, int64_t size, T* to) {
    for (int64_t i = 0; i < size; i += LANES) {
        store(to + i, load(from + i, lanes(size - i)), lanes(size - i));
    }
}

}  // namespace sarathi
