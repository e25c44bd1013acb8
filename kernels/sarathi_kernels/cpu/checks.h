// What Python hands over, held against the memory that it says it has: of each the first fault in words, or null.
#pragma once

#include <algorithm>

#include "structures.h"

namespace sarathi {

using Fault = const char*;

constexpr int64_t MAX_HEAD_SIZE = 256;

inline bool are_below(const int64_t* numbers, int64_t count, int64_t end) {
    return std::all_of(numbers, numbers + count, [=](int64_t number) { return 0 <= number && number < end; });
}

inline Fault fault_of(const Shape& shape) {
    if (shape.num_kv_heads < 1 || shape.num_heads < 1 || shape.num_heads % shape.num_kv_heads) {
        return "the query heads do not share the heads of keys evenly";
    }
    if (shape.head_size < 1 || shape.head_size > MAX_HEAD_SIZE) {
        return "heads have from 1 to 256 entries";
    }
    return shape.window < 0 ? "a sliding window has no negative size" : nullptr;
}

// The blocks that hold the context of one segment.
inline bool is_in_cache(const Segment& segment, int64_t block_size, int64_t num_blocks) {
    const int64_t needed = (segment.kv_len + block_size - 1) / block_size;
    if (needed > segment.num_blocks) {
        return false;
    }
    return segment.blocks ? are_below(segment.blocks, needed, num_blocks)
                          : 0 <= segment.first_block && segment.first_block <= num_blocks - needed;
}

inline Fault fault_of(const Segment* segments, int64_t num_segments, int64_t num_tokens, int64_t block_size,
                      int64_t num_blocks) {
    int64_t row = 0;
    for (const Segment* segment = segments; segment < segments + num_segments; ++segment) {
        if (segment->start != row || segment->num_queries < 1 || segment->num_queries > segment->kv_len) {
            return "segments are not the newest tokens of their contexts, one after the other";
        }
        if (!is_in_cache(*segment, block_size, num_blocks)) {
            return "a context lies beyond its blocks, or these beyond the cache";
        }
        row += segment->num_queries;
    }
    return row == num_tokens ? nullptr : "segments do not cover all tokens";
}

inline bool has_sizes(const Linear& linear, int64_t in_features, int64_t out_features) {
    return linear.in_features == in_features && linear.out_features == out_features;
}

// Of a feed-forward block, which may be missing.
inline bool have_sizes(const Linear& up, const Linear& down, const Linear& first_down, const Model& model) {
    return !up.weight == !down.weight &&
           (!up.weight || (has_sizes(up, model.hidden_size, down.in_features) &&
                           has_sizes(down, first_down.in_features, model.hidden_size)));
}

inline bool has_sizes(const Layer& layer, const Model& model) {
    const int64_t queries = model.num_heads * model.head_size, keys = model.num_kv_heads * model.head_size;
    const auto is_of_heads = [&](const Norm& norm) { return !norm.weight || norm.size == model.head_size; };
    return layer.attention_norm.size == model.hidden_size && layer.ffn_norm.size == model.hidden_size &&
           is_of_heads(layer.query_norm) && is_of_heads(layer.key_norm) &&
           has_sizes(layer.qkv, model.hidden_size, queries + 2 * keys) && has_sizes(layer.out, queries, model.hidden_size) &&
           have_sizes(layer.up, layer.down, model.layers[0].down, model) &&
           have_sizes(layer.expert_up, layer.expert_down, model.layers[0].expert_down, model) &&
           (!layer.shared_gate.weight || has_sizes(layer.shared_gate, model.hidden_size, 1)) &&
           !layer.router.weight == !layer.expert_up.weight &&
           (!layer.router.weight || (has_sizes(layer.router, model.hidden_size, model.num_experts) &&
                                     0 < model.experts_per_token && model.experts_per_token <= model.num_experts));
}

inline Fault fault_of(const Model& model) {
    if (const Fault fault = fault_of(Shape{model.num_heads, model.num_kv_heads, model.head_size, 1, model.window, 1.0f})) {
        return fault;
    }
    if (model.rotary_half < 0 || 2 * model.rotary_half > model.head_size) {
        return "more is rotated than a head has";
    }
    const bool is_whole = model.num_layers > 0 && model.final_norm.size == model.hidden_size &&
                          has_sizes(model.head, model.hidden_size, model.vocab_size) &&
                          std::all_of(model.layers, model.layers + model.num_layers,
                                      [&](const Layer& layer) { return has_sizes(layer, model); });
    return is_whole ? nullptr : "the weights do not match the model's sizes";
}

inline Fault fault_of(const Batch& batch, const Model& model) {
    if (!are_below(batch.token_ids, batch.num_tokens, model.vocab_size)) {
        return "a token is not in the vocabulary";
    }
    if (!are_below(batch.positions, batch.num_tokens, batch.num_positions)) {
        return "a position has no cosines and sines";
    }
    if (!are_below(batch.slots, batch.num_tokens, batch.num_blocks * batch.block_size)) {
        return "a slot is not in the cache";
    }
    if (!are_below(batch.emit_rows, batch.num_emits, batch.num_tokens)) {
        return "a row that is to emit is not there";
    }
    return fault_of(batch.segments, batch.num_segments, batch.num_tokens, batch.block_size, batch.num_blocks);
}

}  // namespace sarathi
