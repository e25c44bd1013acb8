// Attention's operands as AMX reads them: in tiles of bfloat16.
#pragma once

#include "attention_cache.h"

#ifdef SARATHI_AMX
namespace sarathi {

// Rows of 16 numbers of 32 bits become columns.
inline void transpose(__m512i (&x)[LANES]) {
    Vector rows[LANES];
    std::memcpy(rows, x, sizeof rows);
    transpose(rows);
    std::memcpy(x, rows, sizeof rows);
}

// Of two vectors: a number of the first, one of the second, and so on.
inline __m512i to_bf16_pairs(Vector first, Vector second) {
    const __m512i bits = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
    const __m512i of_both = _mm512_add_epi32(_mm512_set1_epi32(0x100000),
                                             _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,
                                                                                  12, 13, 14, 15),
                                                                _mm512_set1_epi32(0x10001)));
    return _mm512_permutexvar_epi16(of_both, bits);
}

// [head_size][32], scaled: the right side of keys times queries; see `packing.py`. `query` is the panel's first, `count`
// are left from there.
inline void load_queries(const float* query, int64_t stride, int64_t count, int64_t size, float scale, bf16* panel) {
    for (int64_t half = 0; half < PANEL; half += LANES) {
        for (int64_t i = 0; i < size; i += KBLOCK) {
            __m512i rows[LANES];
            for (int64_t lane = 0; lane < LANES; ++lane) {
                const Vector left = scaled_query(query, stride, half + lane, count, i, size, scale);
                const Vector right = scaled_query(query, stride, half + lane, count, i + LANES, size, scale);
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

// What the softmax leaves of two keys' scores.
inline void put_weights(bf16* weights, int64_t key, int half, Vector first, Vector second, bool) {
    bf16* tile = weights + key / KBLOCK * 2 * TILE + half * TILE;
    _mm512_storeu_si512(tile + key % KBLOCK / 2 * KBLOCK, to_bf16_pairs(first, second));
}

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
            put_weights(weights, key, 0, broadcast(0.0f), broadcast(0.0f), true);
            put_weights(weights, key, 1, broadcast(0.0f), broadcast(0.0f), true);
        }
        multiply_tiles(values, KEY_TILE, weights, whole, size, sums, true, false);
    }
    static bf16* weights(AttentionScratch& scratch) { return reinterpret_cast<bf16*>(scratch.weights.data()); }
};

}  // namespace sarathi
#endif
