// What Python fills in, field by field: see `library.py`.
#pragma once

#include <cstdint>

#include "attention_cache.h"

namespace sarathi {

struct Linear {
    const void* weight;  // packed
    const float* bias;   // as wide as the packed weight, or null
    int64_t in_features, out_features;  // of a gated product, what is left of each pair
};

struct Norm {
    const float *weight, *bias;  // weight null: no norm
    int64_t size;
    float epsilon;
    int32_t is_layer;
};

struct Layer {
    Norm attention_norm, ffn_norm, query_norm, key_norm;
    Linear qkv, out;
    Linear up, down;
};

struct Model {
    const Layer* layers;
    const void* embedding;  // [vocab_size, hidden_size]
    Norm final_norm;
    Linear head;
    int64_t num_layers, vocab_size, hidden_size, num_heads, num_kv_heads, head_size, rotary_half, window;
    int32_t is_bf16, activation, is_gated;
    float scale;
};

struct Batch {
    const int64_t *token_ids, *positions, *slots, *emit_rows;
    const Segment* segments;
    int64_t num_tokens, num_segments, num_emits;
    void *keys, *values;  // [layers, blocks, block_size, kv_heads, head_size]
    int64_t num_blocks, block_size;
    const float *cosines, *sines;  // [num_positions, rotary_half]
    int64_t num_positions;
    float* logits;  // [num_emits, vocab_size]
    int32_t kv_type;
    int64_t* nanoseconds;  // of each Operation, added to what is there; null: nobody asks
};

enum Activation { SILU, GELU, GELU_TANH };
// In the order in which `structures.py` names them; WAITING is that of threads for each other in all of them.
enum Operation {
    EMBEDDING, ELEMENTWISE, QKV_PROJ, ROTARY, ATTENTION_PREFILL, ATTENTION_DECODE, OUT_PROJ, FFN_UP, FFN_DOWN, LM_HEAD,
    WAITING
};
enum KvType { FLOAT32, BFLOAT16 };

}  // namespace sarathi
