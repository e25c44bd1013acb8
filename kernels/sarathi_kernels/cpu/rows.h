// What is done to each row by itself: norms, rotary embedding.
#pragma once

#include <cmath>

#include "linear.h"

namespace sarathi {

// Calls `put(column, normed, mask)` for 16 columns after another; every part of the row is read before it is put.
template <class Put>
void norm_row(const float* x, int64_t size, const Norm& norm, Put&& put) {
    Vector sum = broadcast(0.0f), squares = broadcast(0.0f);
    float mean = 0.0f;
    if (norm.is_layer) {
        for (int64_t i = 0; i < size; i += LANES) {
            sum = sum + load(x + i, lanes(size - i));
        }
        mean = reduce_add(sum) / static_cast<float>(size);
    }
    for (int64_t i = 0; i < size; i += LANES) {
        const Mask mask = lanes(size - i);
        const Vector centred = keep(load(x + i, mask) - broadcast(mean), mask);
        squares = fma(centred, centred, squares);
    }
    const float scale = 1.0f / std::sqrt(reduce_add(squares) / static_cast<float>(size) + norm.epsilon);
    for (int64_t i = 0; i < size; i += LANES) {
        const Mask mask = lanes(size - i);
        const Vector centred = load(x + i, mask) - broadcast(mean);
        Vector y = centred * broadcast(scale) * load(norm.weight + i, mask);
        y = norm.bias ? y + load(norm.bias + i, mask) : y;
        put(i, y, mask);
    }
}

inline void norm_rows(const float* hidden, int64_t rows, int64_t size, const Norm& norm, Inputs& out) {
    pool->share_rows(rows, [&](int64_t row) {
        norm_row(hidden + row * size, size, norm, [&](int64_t i, Vector y, Mask mask) { out.put(row, i, y, mask); });
    });
}

inline void rotate(float* head, const float* cosines, const float* sines, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        const Mask mask = lanes(half - i);
        const Vector x = load(head + i, mask), y = load(head + half + i, mask);
        const Vector c = load(cosines + i, mask), s = load(sines + i, mask);
        store(head + i, fma(-y, s, x * c), mask);
        store(head + half + i, fma(x, s, y * c), mask);
    }
}

template <class From, class T>
void copy_row(const From* from, int64_t size, T* to) {
    for (int64_t i = 0; i < size; i += LANES) {
        store(to + i, load(from + i, lanes(size - i)), lanes(size - i));
    }
}

}  // namespace sarathi
