// What Python hands over, held against the memory that it says it has: the first fault is thrown, in words.
#pragma once

#include <algorithm>

#include "structures.h"

namespace sarathi {

using Fault = const char*;

constexpr int64_t MAX_HEAD_SIZE = 256;

inline void require(bool holds, Fault otherwise) {
    if (!holds) {
        throw otherwise;
    }
}

inline bool are_below(const int64_t* numbers, int64_t count, int64_t end) {
    return std::all_of(numbers, numbers + count, [=](int64_t number) { return 0 <= number && number < end; });
}

inline void check_heads(const Model& model) {
    require(model.num_kv_heads > 0 && model.num_heads > 0 && model.num_heads % model.num_kv_heads == 0,
            "the query heads do not share the heads of keys evenly");
    require(0 < model.head_size && model.head_size <= MAX_HEAD_SIZE, "heads have from 1 to 256 entries");
    require(model.window >= 0, "a sliding window has no negative size");
}

inline void check_segments(const Batch& batch) {
    require(batch.block_size > 0, "a block holds no tokens");
    int64_t row = 0;
    for (const Segment* one = batch.segments; one < batch.segments + batch.num_segments; ++one) {
        require(one->start == row && 0 < one->num_queries && one->num_queries <= one->kv_len,
                "segments are not the newest tokens of their contexts, one after the other");
        const int64_t needed = (one->kv_len + batch.block_size - 1) / batch.block_size;
        require(needed <= one->num_blocks &&
                    (one->blocks ? are_below(one->blocks, needed, batch.num_blocks)
                                 : 0 <= one->first_block && one->first_block <= batch.num_blocks - needed),
                "a context lies beyond its blocks, or these beyond the cache");
        row += one->num_queries;
    }
    require(row == batch.num_tokens, "segments do not cover all tokens");
}

// Feed-forward blocks, experts and a gate may be missing.
inline bool has_sizes(const Layer& layer, const Model& model) {
    const Layer& first = model.layers[0];  // whose blocks are as wide as all others
    const int64_t width = model.hidden_size, keys = model.num_kv_heads * model.head_size;
    const int64_t queries = model.num_heads * model.head_size;
    const auto fits = [](const Linear& linear, int64_t in_features, int64_t out_features) {
        return !linear.weight || (linear.in_features == in_features && linear.out_features == out_features);
    };
    const auto is_of_heads = [&](const Norm& norm) { return !norm.weight || norm.size == model.head_size; };
    return layer.attention_norm.size == width && layer.ffn_norm.size == width && is_of_heads(layer.query_norm) &&
           is_of_heads(layer.key_norm) && layer.qkv.weight && fits(layer.qkv, width, queries + 2 * keys) &&
           layer.out.weight && fits(layer.out, queries, width) && !layer.up.weight == !layer.down.weight &&
           fits(layer.up, width, first.down.in_features) && fits(layer.down, first.down.in_features, width) &&
           fits(layer.shared_gate, width, 1) && !layer.router.weight == !layer.expert_up.weight &&
           !layer.router.weight == !layer.expert_down.weight && fits(layer.router, width, model.num_experts) &&
           fits(layer.expert_up, width, first.expert_down.in_features) &&
           fits(layer.expert_down, first.expert_down.in_features, width) &&
           (!layer.router.weight || (0 < model.experts_per_token && model.experts_per_token <= model.num_experts));
}

inline void check(const Model& model) {
    check_heads(model);
    require(0 <= model.rotary_half && 2 * model.rotary_half <= model.head_size, "more is rotated than a head has");
    require(model.num_layers > 0 && model.final_norm.size == model.hidden_size &&
                model.head.in_features == model.hidden_size && model.head.out_features == model.vocab_size &&
                std::all_of(model.layers, model.layers + model.num_layers,
                            [&](const Layer& layer) { return has_sizes(layer, model); }),
            "the weights do not match the model's sizes");
}

inline void check(const Batch& batch, const Model& model) {
    require(are_below(batch.token_ids, batch.num_tokens, model.vocab_size), "a token is not in the vocabulary");
    require(are_below(batch.positions, batch.num_tokens, batch.num_positions), "a position has no cosines and sines");
    require(are_below(batch.slots, batch.num_tokens, batch.num_blocks * batch.block_size), "a slot is not in the cache");
    require(are_below(batch.emit_rows, batch.num_emits, batch.num_tokens), "a row that is to emit is not there");
    check_segments(batch);
}

}  // namespace sarathi
