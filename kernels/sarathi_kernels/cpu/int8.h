// Products in int8, of inputs and weights that are multiples of a row's and of a column's scale: sums are exact.
#pragma once

#include <bit>

#include "structures.h"

namespace sarathi {

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

// The sums of rows with a panel of the weight, int32 where `sums` lies, become floats. The rows' scales are `stride` apart.
inline void scale_sums(float* sums, int64_t rows, const float* scales, int64_t stride, const Linear& linear, int64_t panel) {
    const int32_t* excess = linear.sums + panel * PANEL;  // 128 of each if inputs were so much too large
    for (int64_t row = 0; row < rows; ++row, sums += PANEL, scales += stride) {
        for (int64_t column = 0; column < PANEL; ++column) {
            const int32_t sum = std::bit_cast<int32_t>(sums[column]) - (IS_UNSIGNED ? 128 * excess[column] : 0);
            sums[column] = static_cast<float>(sum) * *scales * linear.scales[panel * PANEL + column];
        }
    }
}

}  // namespace sarathi
