// Attention's operands in tiles of bfloat16, as AMX reads them, and where there is none products of pairs.
#pragma once

#include "attention_cache.h"

#ifdef __AVX512BF16__
namespace sarathi {

// Rows of 16 numbers of 32 bits become columns.
inline void transpose(__m512i (&x)[LANES]) {
    Vector rows[LANES];
    std::memcpy(rows, x, sizeof rows);
    transpose(rows);
    std::memcpy(x, rows, sizeof rows);
}

// Two vectors as bfloat16, one behind the other.
inline __m512i to_bf16(Vector first, Vector second) {
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
}

// [head_size][32], scaled: the right side of keys times queries; see `packing.py`.
inline void load_queries(const float* const* query, int64_t size, float scale, bf16* panel) {
    for (int64_t half = 0; half < PANEL; half += LANES) {
        for (int64_t i = 0; i < size; i += KBLOCK) {
            __m512i rows[LANES];
            for (int64_t lane = 0; lane < LANES; ++lane) {
                const float* row = query[half + lane] + i;
                rows[lane] = to_bf16(load(row) * broadcast(scale), load(row + LANES) * broadcast(scale));
            }
            transpose(rows);
            bf16* tile = panel + i / KBLOCK * 2 * TILE + half / LANES * TILE;
            for (int64_t pair = 0; pair < LANES; ++pair) {
                _mm512_storeu_si512(tile + pair * KBLOCK, rows[pair]);
            }
        }
    }
}

// Thirty-two entries of a token, `i` on; zero beyond the last token, as what lies there may be no number.
inline __m512i load_kblock(const Rows<bf16, KEY_TILE>& rows, int64_t token, int64_t i) {
    return token < rows.count ? _mm512_loadu_si512(rows.of[token] + i) : _mm512_setzero_si512();
}

// What the softmax leaves of two keys' scores: of each lane that of the first, then that of the second.
inline void put_weights(bf16* weights, int64_t key, int half, Vector first, Vector second, bool) {
    const __m512i numbers = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i order = _mm512_or_si512(numbers, _mm512_slli_epi32(_mm512_add_epi32(numbers, _mm512_set1_epi32(16)), 16));
    bf16* to = weights + key / KBLOCK * 2 * TILE + half * TILE + key % KBLOCK / 2 * KBLOCK;
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, to_bf16(first, second)));
}

// How bfloat16 is multiplied; heads have a multiple of 32 entries.
struct InTiles {
    using Element = bf16;
    static void load_keys(const Rows<bf16, KEY_TILE>& keys, int64_t size, bf16* to) {
        for (int64_t i = 0; i < size; i += KBLOCK) {
            for (int64_t token = 0; token < keys.count; ++token) {
                _mm512_storeu_si512(to + in_tiles(token, i, size), load_kblock(keys, token, i));
            }
        }
    }
    // Transposed, [head_size][KEY_TILE].
    static void load_values(const Rows<bf16, KEY_TILE>& values, int64_t size, bf16* to) {
        for (int64_t token = 0; token < values.count; token += KBLOCK) {
            for (int64_t i = 0; i < size; i += KBLOCK) {
                __m512i pairs[2][LANES];
                for (int64_t pair = 0; pair < LANES; ++pair) {
                    const __m512i low = load_kblock(values, token + 2 * pair, i);
                    const __m512i high = load_kblock(values, token + 2 * pair + 1, i);
                    pairs[0][pair] = _mm512_mask_blend_epi16(0xAAAAAAAA, low, _mm512_slli_epi32(high, 16));  // evens
                    pairs[1][pair] = _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(low, 16), high);  // odds
                }
                transpose(pairs[0]);
                transpose(pairs[1]);
                for (int64_t row = 0; row < KBLOCK; ++row) {
                    _mm512_storeu_si512(to + in_tiles(i + row, token, KEY_TILE), pairs[row % 2][row / 2]);
                }
            }
        }
    }
    static void score(const bf16* keys, int64_t num_keys, const bf16* queries, int64_t size, float* scores) {
        multiply_in_tiles<false, false>(keys, size, queries, size, num_keys, scores);
    }
    static void add(const bf16* values, bf16* weights, int64_t num_keys, int64_t size, float* sums) {
        const int64_t whole = (num_keys + KBLOCK - 1) / KBLOCK * KBLOCK;
        for (int64_t key = (num_keys + 1) / 2 * 2, half = 0; key < whole; key += 2 * half, half = 1 - half) {
            put_weights(weights, key, static_cast<int>(half), broadcast(0.0f), broadcast(0.0f), true);
        }
        multiply_in_tiles<true, false>(values, KEY_TILE, weights, whole, size, sums);
    }
    static bf16* weights(AttentionScratch& scratch) { return reinterpret_cast<bf16*>(scratch.weights.data()); }
};

}  // namespace sarathi
#endif
