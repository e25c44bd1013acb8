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
// `first_block` on, or in those that `blocks` lists.
struct Segment {
    int64_t start, num_queries, kv_len, first_block;
    const int64_t* blocks;
};

struct Shape {
    int64_t num_heads, num_kv_heads, head_size, block_size, window;  // window 0: all are seen
    float scale;
    int64_t group() const { return num_heads / num_kv_heads; }
    int64_t first_key(int64_t position) const { return window ? std::max<int64_t>(0, position - window + 1) : 0; }
};

// Keys or values of one layer and head.
template <class T>
struct Cache {
    const T* data;
    const Shape& shape;
    const Segment& segment;

    // Where the keys or values of `count` tokens from `first` on lie.
    void find(int64_t first, int64_t count, const T** rows) const {
        const int64_t width = shape.num_kv_heads * shape.head_size;
        for (int64_t token = first; token < first + count;) {
            const int64_t block = token / shape.block_size, end = std::min(first + count, (block + 1) * shape.block_size);
            const int64_t id = segment.blocks ? segment.blocks[block] : segment.first_block + block;
            const T* row = data + (id * shape.block_size + token % shape.block_size) * width;
            for (; token < end; ++token, row += width) {
                *rows++ = row;
            }
        }
    }
};

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
