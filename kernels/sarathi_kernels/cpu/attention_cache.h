// Where the keys and values of a paged cache lie, and what a thread needs to attend to them.
#pragma once

#include <algorithm>
#include <vector>

#include "products.h"

namespace sarathi {

constexpr int64_t KEY_TILE = 96;
constexpr int64_t MOST_QUERIES = 128;  // of one head that share a pass over the keys
constexpr float LOG2_E = 1.44269504f;
constexpr float LOWEST = -1e30f;      // below every score, yet finite: differences with it are numbers

// The newest tokens of one sequence, rows `start` on, and where its `kv_len` keys lie: in neighbouring blocks from
// `first_block` on, or in those that `blocks` lists: `num_blocks` of them.
struct Segment {
    int64_t start, num_queries, kv_len, first_block, num_blocks;
    const int64_t* blocks;
};

struct Shape {
    int64_t num_heads, num_kv_heads, head_size, block_size, window;  // window 0: all are seen
    float scale;
    int64_t group() const { return num_heads / num_kv_heads; }
    int64_t first_key(int64_t position) const { return window ? std::max<int64_t>(0, position - window + 1) : 0; }
};

// Keys or values of one layer, or what is left of them from some head on: entries, and in 8 bits the scale of each head.
template <class T>
struct Stored {
    T* data;
    float* scales;
    Stored from_head(int64_t head, const Shape& shape) const {
        return {data + head * shape.head_size, IS_SCALED<std::remove_const_t<T>> ? scales + head : nullptr};
    }
};

// The same as one segment sees it, of one head.
template <class T>
struct Cache {
    Stored<const T> stored;
    const Shape& shape;
    const Segment& segment;

    // Where the keys or values of `count` tokens from `first` on lie.
    void find(int64_t first, int64_t count, const T** rows) const {
        find_rows(stored.data, shape.num_kv_heads * shape.head_size, first, count, rows);
    }

    // And their scales, if they have any.
    void find_scales(int64_t first, int64_t count, const float** scales) const {
        if constexpr (IS_SCALED<T>) {
            find_rows(static_cast<const float*>(stored.scales), shape.num_kv_heads, first, count, scales);
        }
    }

    template <class E>
    void find_rows(const E* data, int64_t width, int64_t first, int64_t count, const E** rows) const {
        for (int64_t token = first; token < first + count;) {
            const int64_t block = token / shape.block_size, end = std::min(first + count, (block + 1) * shape.block_size);
            const int64_t id = segment.blocks ? segment.blocks[block] : segment.first_block + block;
            const E* row = data + (id * shape.block_size + token % shape.block_size) * width;
            for (; token < end; ++token, row += width) {
                *rows++ = row;
            }
        }
    }
};

// Sixteen entries, times the scale of their head if they have one.
template <class T>
Vector load_entries(const T* from, [[maybe_unused]] const float* scale, Mask mask = lanes(LANES)) {
    if constexpr (IS_SCALED<T>) {
        return load(from, mask) * broadcast(*scale);
    } else {
        return load(from, mask);
    }
}

// 16 floats of each of 16 queries, scaled. Lanes beyond the last query repeat it: nobody reads their results.
inline Vector scaled_query(const float* query, int64_t stride, int64_t lane, int64_t count, int64_t i, int64_t size,
                           float scale) {
    const float* row = query + std::min(lane, count - 1) * stride;
    return load(row + i, lanes(size - i)) * broadcast(scale);
}

// What one thread needs of its own.
struct AttentionScratch {
    Floats keys, values, scores, weights, queries, sums, maxima, totals;

    void reserve(const Shape& shape, int64_t longest) {
        const int64_t panels = shape.group() * MOST_QUERIES / PANEL, padded = (shape.head_size + 15) / 16 * 16;
        grow(keys, KEY_TILE * shape.head_size);
        grow(values, KEY_TILE * shape.head_size);
        grow(scores, std::max(KEY_TILE * PANEL, shape.num_heads * longest));
        grow(weights, KEY_TILE * PANEL / 2);
        grow(queries, panels * padded * PANEL);
        grow(sums, std::max(panels * PANEL, 2 * shape.num_heads) * padded);
        grow(maxima, panels * PANEL);
        grow(totals, std::max(panels * PANEL, shape.num_heads));
    }

    static void grow(Floats& buffer, int64_t size) {
        if (static_cast<int64_t>(buffer.size()) < size) {
            buffer.resize(size);
        }
    }
};

}  // namespace sarathi
