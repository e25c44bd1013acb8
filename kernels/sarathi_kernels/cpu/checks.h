// Numbers that Python hands over, held against the memory that they point into: the first fault is thrown, in words.
// Python itself checks sizes (`checks.py`).
#pragma once

#include <algorithm>

#include "structures.h"

namespace sarathi {

using Fault = const char*;

inline void require(bool holds, Fault otherwise) {
    if (!holds) {
        throw otherwise;
    }
}

inline bool are_below(const int64_t* numbers, int64_t count, int64_t end) {
    return std::all_of(numbers, numbers + count, [=](int64_t number) { return 0 <= number && number < end; });
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

inline void check(const Batch& batch, const Model& model) {
    require(are_below(batch.token_ids, batch.num_tokens, model.vocab_size), "a token is not in the vocabulary");
    require(are_below(batch.positions, batch.num_tokens, batch.num_positions), "a position has no cosines and sines");
    require(are_below(batch.slots, batch.num_tokens, batch.num_blocks * batch.block_size), "a slot is not in the cache");
    require(are_below(batch.emit_rows, batch.num_emits, batch.num_tokens), "a row that is to emit is not there");
    check_segments(batch);
}

}  // namespace sarathi
