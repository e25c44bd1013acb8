// Attention of many queries at a time. Scores are kept transposed, a row per key and a lane per query: then maxima and
// sums need no exchange between lanes, and keys are multiplied as they lie.
#pragma once

#include <limits>

#include "attention_amx.h"

namespace sarathi {

// Some queries of one segment, from `first` on, of all heads that share a key head. A panel is up to 32 of one head.
struct QueryTile {
    int64_t kv_head, first, count, group;
    int64_t parts() const { return (count + PANEL - 1) / PANEL; }
    int64_t panels() const { return group * parts(); }
    int64_t head(int64_t panel) const { return kv_head * group + panel / parts(); }
    int64_t query(int64_t panel) const { return panel % parts() * PANEL; }  // the panel's first, counted from `first`
};

// [head_size][32]: the right side of keys times queries. `query` is the panel's first, `count` are left from there.
inline void load_queries(const float* query, int64_t stride, int64_t count, int64_t size, float scale, float* panel) {
    for (int64_t half = 0; half < PANEL; half += LANES) {
        for (int64_t i = 0; i < size; i += LANES) {
            Vector rows[LANES];
            for (int64_t lane = 0; lane < LANES; ++lane) {
                rows[lane] = scaled_query(query, stride, half + lane, count, i, size, scale);
            }
            transpose(rows);
            for (int64_t row = 0; row < std::min(LANES, size - i); ++row) {
                store(panel + (i + row) * PANEL + half, rows[row]);
            }
        }
    }
}

template <class T>
void copy_rows(const Cache<T>& from, int64_t first, int64_t count, float* to) {
    const int64_t size = from.shape.head_size;
    const T* rows[KEY_TILE];
    const float* scales[KEY_TILE] = {};
    from.find(first, count, rows);
    from.find_scales(first, count, scales);
    for (int64_t token = 0; token < count; ++token, to += size) {
        for (int64_t i = 0; i < size; i += LANES) {
            store(to + i, load_entries(rows[token] + i, scales[token], lanes(size - i)), lanes(size - i));
        }
    }
}

// Scores that a query must not see become -infinity. Query q is at `position + q`.
inline void hide(const Shape& shape, float* scores, int64_t first_key, int64_t num_keys, int64_t position) {
    const Vector hidden = broadcast(-std::numeric_limits<float>::infinity());
    for (int64_t key = 0; key < num_keys; ++key, scores += PANEL) {
        const int64_t first = first_key + key - position;  // query that sees this key
        const int64_t end = shape.window ? std::max<int64_t>(0, first + shape.window) : PANEL;
        for (int64_t query = 0; query < first; query += LANES) {
            store(scores + query, hidden, lanes(std::min(first, PANEL) - query));
        }
        for (int64_t query = end; query < PANEL; query += LANES) {
            store(scores + query, hidden, lanes(PANEL - query));
        }
    }
}

// Maxima of scores [keys][32 queries] and of `before`; a score that is no number is passed over.
inline void find_maxima(const float* scores, int64_t num_keys, const float* before, Vector (&most)[2]) {
    Vector other[2];  // every other key, as a maximum waits for the one before
    for (int half = 0; half < 2; ++half) {
        most[half] = other[half] = load(before + half * LANES);
    }
    for (int64_t key = 0; key < num_keys; key += 2) {
        const float *first = scores + key * PANEL, *second = scores + std::min(key + 1, num_keys - 1) * PANEL;
        for (int half = 0; half < 2; ++half) {
            most[half] = max(load(first + half * LANES), most[half]);
            other[half] = max(load(second + half * LANES), other[half]);
        }
    }
    for (int half = 0; half < 2; ++half) {
        most[half] = max(most[half], other[half]);
    }
}

// What the softmax leaves of two keys' scores takes their place.
inline void put_weights(float* scores, int64_t key, int half, Vector first, Vector second, bool has_second) {
    store(scores + key * PANEL + half * LANES, first);
    if (has_second) {
        store(scores + (key + 1) * PANEL + half * LANES, second);
    }
}

// Scales what was gathered under older maxima to the new. Until a maximum has grown much the old one does: it cancels out.
inline void renew_maxima(int half, Vector most, int64_t head_size, float* maxima, float* totals, float* sums) {
    const Vector before = load(maxima + half * LANES);
    if (!exceeds(most - before, broadcast(8.0f))) {
        return;
    }
    const Vector kept = power_of_two<6>(before - most);
    store(maxima + half * LANES, most);
    store(totals + half * LANES, load(totals + half * LANES) * kept);
    for (int64_t i = 0; i < head_size; ++i) {
        float* sum = sums + i * PANEL + half * LANES;
        store(sum, load(sum) * kept);
    }
}

// Softmax of scores [keys][32 queries], in powers of two, over all keys so far: `weights` are put, and their sums added
// to `totals`; `sums`, [head_size][32], are what the weights so far gathered of the values.
template <class T>
void soften(const float* scores, int64_t num_keys, int64_t head_size, float* maxima, float* totals, float* sums,
            T* weights) {
    constexpr int DEGREE = sizeof(T) == 2 ? 4 : 6;
    Vector most[2], total[2];
    find_maxima(scores, num_keys, maxima, most);
    for (int half = 0; half < 2; ++half) {
        renew_maxima(half, most[half], head_size, maxima, totals, sums);
        most[half] = load(maxima + half * LANES);
        total[half] = load(totals + half * LANES);
    }
    for (int64_t key = 0; key < num_keys; key += 2) {
        const bool has_second = key + 1 < num_keys;
        for (int half = 0; half < 2; ++half) {
            const float* score = scores + key * PANEL + half * LANES;
            const Vector first = power_of_two<DEGREE>(load(score) - most[half]);
            Vector second = broadcast(0.0f);
            if (has_second) {
                second = power_of_two<DEGREE>(load(score + PANEL) - most[half]);
            }
            total[half] = total[half] + (first + second);
            put_weights(weights, key, half, first, second, has_second);
        }
    }
    for (int half = 0; half < 2; ++half) {
        store(totals + half * LANES, total[half]);
    }
}

// How float32 is multiplied, from keys and values that are converted to it.
template <class T>
struct InFloats {
    using Element = float;
    static void load_keys(const Cache<T>& keys, int64_t first, int64_t count, float* to) { copy_rows(keys, first, count, to); }
    static void load_values(const Cache<T>& values, int64_t first, int64_t count, float* to) {
        copy_rows(values, first, count, to);
    }
    static void score(const float* keys, int64_t num_keys, const float* queries, int64_t size, float* scores) {
        multiply_rows<false>(keys, size, 1, queries, size, num_keys, scores);
    }
    static void add(const float* values, const float* weights, int64_t num_keys, int64_t size, float* sums) {
        multiply_rows<true>(values, 1, size, weights, num_keys, size, sums);
    }
    static float* weights(AttentionScratch& scratch) { return scratch.scores.data(); }
};

// Hands out the queries' results, divided by their totals.
template <class Put>
void put_sums(const float* sums, const float* totals, int64_t size, int64_t count, int64_t row, int64_t column, Put&& put) {
    for (int64_t half = 0; half < std::min(PANEL, count); half += LANES) {
        const Vector inverse = broadcast(1.0f) / load(totals + half);
        for (int64_t i = 0; i < size; i += LANES) {
            Vector rows[LANES];
            for (int64_t at = 0; at < LANES; ++at) {
                const float* sum = sums + std::min(i + at, size - 1) * PANEL + half;
                rows[at] = load(sum) * inverse;
            }
            transpose(rows);
            for (int64_t lane = 0; lane < std::min(LANES, count - half); ++lane) {
                put(row + half + lane, column + i, rows[lane], lanes(size - i));
            }
        }
    }
}

template <class Way, class T, class Put>
void attend_tile(const Shape& shape, const Segment& segment, const QueryTile& tile, const Cache<T>& keys,
                 const Cache<T>& values, const float* query, int64_t query_stride, AttentionScratch& scratch, Put&& put) {
    using Element = typename Way::Element;
    const int64_t size = shape.head_size, first_row = segment.start + tile.first;
    const int64_t position = segment.kv_len - segment.num_queries + tile.first, end = position + tile.count;
    Element* queries = reinterpret_cast<Element*>(scratch.queries.data());
    Element* some_keys = reinterpret_cast<Element*>(scratch.keys.data());
    Element* some_values = reinterpret_cast<Element*>(scratch.values.data());
    std::fill_n(scratch.sums.data(), tile.panels() * size * PANEL, 0.0f);
    std::fill_n(scratch.totals.data(), tile.panels() * PANEL, 0.0f);
    std::fill_n(scratch.maxima.data(), tile.panels() * PANEL, LOWEST);
    for (int64_t panel = 0; panel < tile.panels(); ++panel) {
        const float* from = query + (first_row + tile.query(panel)) * query_stride + tile.head(panel) * size;
        load_queries(from, query_stride, tile.count - tile.query(panel), size, shape.scale * LOG2_E,
                     queries + panel * size * PANEL);
    }
    for (int64_t key = shape.first_key(position); key < end; key += KEY_TILE) {
        const int64_t num_keys = std::min(KEY_TILE, end - key);
        Way::load_keys(keys, key, num_keys, some_keys);
        Way::load_values(values, key, num_keys, some_values);
        for (int64_t panel = 0; panel < tile.panels(); ++panel) {
            const int64_t at = position + tile.query(panel), seen = std::min(num_keys, at + PANEL - key);
            if (seen <= 0) {
                continue;  // all later than these queries
            }
            float *scores = scratch.scores.data(), *sums = scratch.sums.data() + panel * size * PANEL;
            Way::score(some_keys, seen, queries + panel * size * PANEL, size, scores);
            if (key + seen - 1 > at || (shape.window && key <= at + PANEL - 1 - shape.window)) {
                hide(shape, scores, key, seen, at);
            }
            soften(scores, seen, size, scratch.maxima.data() + panel * PANEL, scratch.totals.data() + panel * PANEL, sums,
                   Way::weights(scratch));
            Way::add(some_values, Way::weights(scratch), seen, size, sums);
        }
    }
    for (int64_t panel = 0; panel < tile.panels(); ++panel) {
        put_sums(scratch.sums.data() + panel * size * PANEL, scratch.totals.data() + panel * PANEL, size,
                 tile.count - tile.query(panel), first_row + tile.query(panel), tile.head(panel) * size, put);
    }
}

}  // namespace sarathi
