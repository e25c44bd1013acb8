// Attention of many queries at a time. Scores are kept transposed, a row per key and a lane per query: then maxima and
// sums need no exchange between lanes, and keys are multiplied as they lie.
#pragma once

#include <limits>

#include "attention_cache.h"
#include "products.h"

namespace sarathi {

// Some queries of one segment, from `first` on, of all heads that share a key head. A panel is up to 32 of one head.
struct QueryTile {
    int64_t kv_head, first, count, group;
    int64_t parts() const { return (count + PANEL - 1) / PANEL; }
    int64_t panels() const { return group * parts(); }
    int64_t head(int64_t panel) const { return kv_head * group + panel / parts(); }
    int64_t query(int64_t panel) const { return panel % parts() * PANEL; }  // the panel's first, counted from `first`
};

// 16 floats of each of 16 queries, scaled. Lanes beyond the last query repeat it: nobody reads their results.
inline __m512 scaled_query(const float* query, int64_t stride, int64_t lane, int64_t count, int64_t i, int64_t size,
                           float scale) {
    const float* row = query + std::min(lane, count - 1) * stride;
    return _mm512_mul_ps(load(row + i, lanes(size - i)), _mm512_set1_ps(scale));
}

// [head_size][32]: the right side of keys times queries. `query` is the panel's first, `count` are left from there.
inline void load_queries(const float* query, int64_t stride, int64_t count, int64_t size, float scale, float* panel) {
    for (int64_t half = 0; half < PANEL; half += LANES) {
        for (int64_t i = 0; i < size; i += LANES) {
            __m512i rows[LANES];
            for (int64_t lane = 0; lane < LANES; ++lane) {
                rows[lane] = _mm512_castps_si512(scaled_query(query, stride, half + lane, count, i, size, scale));
            }
            transpose(rows);
            for (int64_t row = 0; row < std::min(LANES, size - i); ++row) {
                store(panel + (i + row) * PANEL + half, _mm512_castsi512_ps(rows[row]));
            }
        }
    }
}

// The same as AMX reads it: see `packing.py`.
inline void load_queries(const float* query, int64_t stride, int64_t count, int64_t size, float scale, bf16* panel) {
    for (int64_t half = 0; half < PANEL; half += LANES) {
        for (int64_t i = 0; i < size; i += KBLOCK) {
            __m512i rows[LANES];
            for (int64_t lane = 0; lane < LANES; ++lane) {
                const __m512 left = scaled_query(query, stride, half + lane, count, i, size, scale);
                const __m512 right = scaled_query(query, stride, half + lane, count, i + LANES, size, scale);
                rows[lane] = _mm512_inserti64x4(_mm512_castsi256_si512(to_bf16(left)), to_bf16(right), 1);
            }
            transpose(rows);
            bf16* tile = panel + i / KBLOCK * 2 * TILE + half / LANES * TILE;
            for (int64_t pair = 0; pair < LANES; ++pair) {
                _mm512_storeu_si512(tile + pair * KBLOCK, rows[pair]);
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

// Sixteen entries in bfloat16, and thirty-two.
inline __m256i load_bf16(const bf16* from, const float*) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

template <class T>
__m256i load_bf16(const T* from, const float* scale) {
    return to_bf16(load_entries(from, scale));
}

template <class T>
__m512i load_kblock(const T* from, const float* scale) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(load_bf16(from, scale)), load_bf16(from + LANES, scale), 1);
}

// Keys as the left side of a product by AMX.
template <class T>
void copy_tiles(const Cache<T>& from, int64_t first, int64_t count, bf16* to) {
    const T* rows[KEY_TILE];
    const float* scales[KEY_TILE] = {};
    from.find(first, count, rows);
    from.find_scales(first, count, scales);
    for (int64_t i = 0; i < from.shape.head_size; i += KBLOCK) {
        for (int64_t token = 0; token < count; ++token) {
            bf16* place = to + in_tiles(token, i, from.shape.head_size);
            _mm512_storeu_si512(place, load_kblock(rows[token] + i, scales[token]));
        }
    }
}

// Values transposed, [head_size][KEY_TILE]; zero beyond `count` to the end of a tile, as what lies there may be no number.
template <class T>
void transpose_tiles(const Cache<T>& from, int64_t first, int64_t count, bf16* to) {
    const T* rows[KEY_TILE];
    const float* scales[KEY_TILE] = {};
    from.find(first, count, rows);
    from.find_scales(first, count, scales);
    for (int64_t token = 0; token < count; token += KBLOCK) {
        for (int64_t i = 0; i < from.shape.head_size; i += LANES) {
            __m512i pairs[LANES];
            for (int64_t pair = 0; pair < LANES; ++pair) {
                const int64_t at = token + 2 * pair;
                const __m256i low = at < count ? load_bf16(rows[at] + i, scales[at]) : _mm256_setzero_si256();
                const __m256i high =
                    at + 1 < count ? load_bf16(rows[at + 1] + i, scales[at + 1]) : _mm256_setzero_si256();
                pairs[pair] = _mm512_or_si512(_mm512_cvtepu16_epi32(low),
                                              _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
            }
            transpose(pairs);
            bf16* tile = to + in_tiles(i, token, KEY_TILE);
            for (int64_t row = 0; row < LANES; ++row) {
                _mm512_storeu_si512(tile + row * KBLOCK, pairs[row]);
            }
        }
    }
}

// Scores that a query must not see become -infinity. Query q is at `position + q`.
inline void hide(const Shape& shape, float* scores, int64_t first_key, int64_t num_keys, int64_t position) {
    const __m512 hidden = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    const __m512i step = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int64_t half = 0; half < PANEL; half += LANES) {
        const __m512i at = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(position + half)), step);
        const __m512i from = _mm512_sub_epi32(at, _mm512_set1_epi32(static_cast<int>(shape.window)));
        for (int64_t key = 0; key < num_keys; ++key) {
            const __m512i where = _mm512_set1_epi32(static_cast<int>(first_key + key));
            __mmask16 seen = _mm512_cmple_epi32_mask(where, at);
            seen &= shape.window ? _mm512_cmpgt_epi32_mask(where, from) : 0xFFFF;
            float* score = scores + key * PANEL + half;
            store(score, _mm512_mask_mov_ps(hidden, seen, load(score)));
        }
    }
}

// Maxima of scores [keys][32 queries] and of `before`; a score that is no number is passed over.
inline void find_maxima(const float* scores, int64_t num_keys, const float* before, __m512 (&most)[2]) {
    __m512 other[2];  // every other key, as a maximum waits for the one before
    for (int half = 0; half < 2; ++half) {
        most[half] = other[half] = load(before + half * LANES);
    }
    for (int64_t key = 0; key < num_keys; key += 2) {
        const float *first = scores + key * PANEL, *second = scores + std::min(key + 1, num_keys - 1) * PANEL;
        for (int half = 0; half < 2; ++half) {
            most[half] = _mm512_max_ps(load(first + half * LANES), most[half]);
            other[half] = _mm512_max_ps(load(second + half * LANES), other[half]);
        }
    }
    for (int half = 0; half < 2; ++half) {
        most[half] = _mm512_max_ps(most[half], other[half]);
    }
}

// What the softmax leaves of two keys' scores takes their place.
inline void put_weights(float* scores, int64_t key, int half, __m512 first, __m512 second, bool has_second) {
    store(scores + key * PANEL + half * LANES, first);
    if (has_second) {
        store(scores + (key + 1) * PANEL + half * LANES, second);
    }
}

// Or lies beside them, as AMX reads it.
inline void put_weights(bf16* weights, int64_t key, int half, __m512 first, __m512 second, bool) {
    bf16* tile = weights + key / KBLOCK * 2 * TILE + half * TILE;
    _mm512_storeu_si512(tile + key % KBLOCK / 2 * KBLOCK, to_bf16_pairs(first, second));
}

// Scales what was gathered under older maxima to the new. Until a maximum has grown much the old one does: it cancels out.
inline void renew_maxima(int half, __m512 most, int64_t head_size, float* maxima, float* totals, float* sums) {
    const __m512 before = load(maxima + half * LANES), much = _mm512_set1_ps(8.0f);
    if (_mm512_cmp_ps_mask(_mm512_sub_ps(most, before), much, _CMP_LE_OQ) == 0xFFFF) {
        return;
    }
    const __m512 kept = power_of_two<6>(_mm512_sub_ps(before, most));
    store(maxima + half * LANES, most);
    store(totals + half * LANES, _mm512_mul_ps(load(totals + half * LANES), kept));
    for (int64_t i = 0; i < head_size; ++i) {
        float* sum = sums + i * PANEL + half * LANES;
        store(sum, _mm512_mul_ps(load(sum), kept));
    }
}

// Softmax of scores [keys][32 queries], in powers of two, over all keys so far: `weights` are put, and their sums added
// to `totals`; `sums`, [head_size][32], are what the weights so far gathered of the values.
template <class T>
void soften(const float* scores, int64_t num_keys, int64_t head_size, float* maxima, float* totals, float* sums,
            T* weights) {
    constexpr int DEGREE = sizeof(T) == 2 ? 4 : 6;
    __m512 most[2], total[2];
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
            const __m512 first = power_of_two<DEGREE>(_mm512_sub_ps(load(score), most[half]));
            __m512 second = _mm512_setzero_ps();
            if (has_second) {
                second = power_of_two<DEGREE>(_mm512_sub_ps(load(score + PANEL), most[half]));
            }
            total[half] = _mm512_add_ps(total[half], _mm512_add_ps(first, second));
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

// How bfloat16 is multiplied by AMX, from keys and values that are or become it; heads have a multiple of 32 entries.
template <class T>
struct InTiles {
    using Element = bf16;
    static void load_keys(const Cache<T>& keys, int64_t first, int64_t count, bf16* to) {
        copy_tiles(keys, first, count, to);
    }
    static void load_values(const Cache<T>& values, int64_t first, int64_t count, bf16* to) {
        transpose_tiles(values, first, count, to);
    }
    static void score(const bf16* keys, int64_t num_keys, const bf16* queries, int64_t size, float* scores) {
        multiply_tiles(keys, size, queries, size, num_keys, scores, false, false);
    }
    static void add(const bf16* values, bf16* weights, int64_t num_keys, int64_t size, float* sums) {
        const int64_t whole = (num_keys + KBLOCK - 1) / KBLOCK * KBLOCK;
        for (int64_t key = (num_keys + 1) / 2 * 2; key < whole; key += 2) {
            put_weights(weights, key, 0, _mm512_setzero_ps(), _mm512_setzero_ps(), true);
            put_weights(weights, key, 1, _mm512_setzero_ps(), _mm512_setzero_ps(), true);
        }
        multiply_tiles(values, KEY_TILE, weights, whole, size, sums, true, false);
    }
    static bf16* weights(AttentionScratch& scratch) { return reinterpret_cast<bf16*>(scratch.weights.data()); }
};

// Hands out the queries' results, divided by their totals.
template <class Put>
void put_sums(const float* sums, const float* totals, int64_t size, int64_t count, int64_t row, int64_t column, Put&& put) {
    for (int64_t half = 0; half < std::min(PANEL, count); half += LANES) {
        const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), load(totals + half));
        for (int64_t i = 0; i < size; i += LANES) {
            __m512i rows[LANES];
            for (int64_t at = 0; at < LANES; ++at) {
                const float* sum = sums + std::min(i + at, size - 1) * PANEL + half;
                rows[at] = _mm512_castps_si512(_mm512_mul_ps(load(sum), inverse));
            }
            transpose(rows);
            for (int64_t lane = 0; lane < std::min(LANES, count - half); ++lane) {
                put(row + half + lane, column + i, _mm512_castsi512_ps(rows[lane]), lanes(size - i));
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
