// Attention of many queries at a time. Scores are kept transposed, a row per key and a lane per query: then maxima and
// sums need no exchange between lanes, and keys are multiplied as they lie.
#pragma once

#include <limits>

#include "attention_bf16.h"

namespace sarathi {

// [head_size][32]: the right side of keys times queries.
inline void load_queries(const float* const* query, int64_t size, float scale, float* panel) {
    for (int64_t half = 0; half < PANEL; half += LANES) {
        for (int64_t i = 0; i < size; i += LANES) {
            Vector rows[LANES];
            for (int64_t lane = 0; lane < LANES; ++lane) {
                rows[lane] = load(query[half + lane] + i, lanes(size - i)) * broadcast(scale);
            }
            transpose(rows);
            for (int64_t row = 0; row < std::min(LANES, size - i); ++row) {
                store(panel + (i + row) * PANEL + half, rows[row]);
            }
        }
    }
}

// Scores that lanes, `first_lane` on, must not see become -infinity.
inline void hide(const Queries& queries, float* scores, int64_t first_key, int64_t num_keys, int64_t first_lane) {
    const Vector hidden = broadcast(-std::numeric_limits<float>::infinity());
    const int64_t group = queries.shape.group(), window = queries.shape.window;
    for (int64_t key = first_key; key < first_key + num_keys; ++key, scores += PANEL) {
        const int64_t first = (key - queries.position(0)) * group - first_lane;  // lane that sees this key
        const int64_t end = window ? std::max<int64_t>(0, first + window * group) : PANEL;
        for (int64_t lane = 0; lane < first; lane += LANES) {
            store(scores + lane, hidden, lanes(std::min(first, PANEL) - lane));
        }
        for (int64_t lane = end; lane < PANEL; lane += LANES) {
            store(scores + lane, hidden, lanes(PANEL - lane));
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
    static void load_keys(const Rows<T, KEY_TILE>& keys, int64_t size, float* to) {
        for (int64_t token = 0; token < keys.count; ++token, to += size) {
            for (int64_t i = 0; i < size; i += LANES) {
                store(to + i, keys.load(token, i, lanes(size - i)), lanes(size - i));
            }
        }
    }
    static void load_values(const Rows<T, KEY_TILE>& values, int64_t size, float* to) { load_keys(values, size, to); }
    static void score(const float* keys, int64_t num_keys, const float* queries, int64_t size, float* scores) {
        multiply_rows<false>(keys, size, 1, queries, size, num_keys, scores);
    }
    static void add(const float* values, const float* weights, int64_t num_keys, int64_t size, float* sums) {
        multiply_rows<true>(values, 1, size, weights, num_keys, size, sums);
    }
    static float* weights(AttentionScratch& scratch) { return scratch.scores.data(); }
};

// Hands out a panel's results, divided by their totals.
template <class Put>
void put_sums(const Queries& queries, int64_t kv_head, int64_t first, const float* sums, const float* totals, Put&& put) {
    const int64_t size = queries.shape.head_size, count = std::min(PANEL, queries.num_lanes() - first);
    for (int64_t half = 0; half < count; half += LANES) {
        const Vector inverse = broadcast(1.0f) / load(totals + half);
        for (int64_t i = 0; i < size; i += LANES) {
            Vector rows[LANES];
            for (int64_t at = 0; at < LANES; ++at) {
                rows[at] = load(sums + std::min(i + at, size - 1) * PANEL + half) * inverse;
            }
            transpose(rows);
            for (int64_t lane = 0; lane < std::min(LANES, count - half); ++lane) {
                const int64_t number = first + half + lane;
                put(queries.row(number), queries.column(kv_head, number) + i, rows[lane], lanes(size - i));
            }
        }
    }
}

// A panel is 32 lanes of one key head.
template <class Way, class T, class Put>
void attend_tile(const Queries& queries, int64_t kv_head, const Cache<T>& keys, const Cache<T>& values,
                 AttentionScratch& scratch, Put&& put) {
    using Element = typename Way::Element;
    const Shape& shape = queries.shape;
    const int64_t size = shape.head_size, num_lanes = queries.num_lanes(), end = queries.end();
    const int64_t panels = (num_lanes + PANEL - 1) / PANEL;
    Element* some_queries = reinterpret_cast<Element*>(scratch.queries.data());
    Element* some_keys = reinterpret_cast<Element*>(scratch.keys.data());
    Element* some_values = reinterpret_cast<Element*>(scratch.values.data());
    std::fill_n(scratch.sums.data(), panels * size * PANEL, 0.0f);
    std::fill_n(scratch.totals.data(), panels * PANEL, 0.0f);
    std::fill_n(scratch.maxima.data(), panels * PANEL, LOWEST);
    for (int64_t panel = 0; panel < panels; ++panel) {
        const float* query[PANEL];
        for (int64_t lane = 0; lane < PANEL; ++lane) {  // those beyond the last repeat it: nobody reads their results
            query[lane] = queries.find(kv_head, std::min(panel * PANEL + lane, num_lanes - 1));
        }
        load_queries(query, size, shape.scale * LOG2_E, some_queries + panel * size * PANEL);
    }
    Rows<T, KEY_TILE> key_rows[2], value_rows[2];
    key_rows[0].find(keys, queries.first_key(), end, size);
    value_rows[0].find(values, queries.first_key(), end, size);
    for (int64_t key = queries.first_key(), now = 0; key < end; key += KEY_TILE, now = 1 - now) {
        key_rows[1 - now].find(keys, key + KEY_TILE, end, size);
        value_rows[1 - now].find(values, key + KEY_TILE, end, size);
        Way::load_keys(key_rows[now], size, some_keys);
        Way::load_values(value_rows[now], size, some_values);
        for (int64_t first = 0; first < num_lanes; first += PANEL) {
            key_rows[1 - now].fetch(panels);
            value_rows[1 - now].fetch(panels);
            const int64_t last = queries.position(std::min(first + PANEL, num_lanes) - 1);
            const int64_t seen = std::min(key_rows[now].count, last + 1 - key);
            if (seen <= 0) {
                continue;  // all later than these queries
            }
            float *scores = scratch.scores.data(), *sums = scratch.sums.data() + first * size;
            Way::score(some_keys, seen, some_queries + first * size, size, scores);
            if (key + seen - 1 > queries.position(first) || (shape.window && key <= last - shape.window)) {
                hide(queries, scores, key, seen, first);
            }
            soften(scores, seen, size, scratch.maxima.data() + first, scratch.totals.data() + first, sums,
                   Way::weights(scratch));
            Way::add(some_values, Way::weights(scratch), seen, size, sums);
        }
    }
    for (int64_t first = 0; first < num_lanes; first += PANEL) {
        put_sums(queries, kv_head, first, scratch.sums.data() + first * size, scratch.totals.data() + first, put);
    }
}

}  // namespace sarathi
