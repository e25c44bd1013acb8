// A mixture of experts: each row passes the few experts that a router chooses for it. The rows of one expert are brought
// together, so that its weights are read once for all of them and all threads share the work of all experts.
#pragma once

#include <cmath>
#include <utility>

#include "linear.h"

namespace sarathi {

// The experts of the largest logits, the first of equals, and their shares: of the softmax over all experts, or over the
// chosen ones if `normalises`. A logit that is not a number counts as the largest, so that the row is none either.
inline void choose(const float* logits, int64_t experts, int64_t count, bool normalises, int64_t* chosen, float* shares) {
    for (int64_t expert = 0; expert < experts; ++expert) {
        int64_t at = std::min(expert, count);
        for (; at > 0 && !(logits[expert] <= logits[chosen[at - 1]]); --at) {
            if (at < count) {
                chosen[at] = chosen[at - 1];
            }
        }
        if (at < count) {
            chosen[at] = expert;
        }
    }
    float sum = 0.0f;
    for (int64_t i = 0; i < (normalises ? count : experts); ++i) {
        sum += std::exp(logits[normalises ? chosen[i] : i] - logits[chosen[0]]);
    }
    for (int64_t i = 0; i < count; ++i) {
        shares[i] = std::exp(logits[chosen[i]] - logits[chosen[0]]) / sum;
    }
}

// What a mixture works on; of the layers one after the other.
struct Mixture {
    Floats logits;  // [rows, experts]
    std::vector<int64_t> chosen, places;  // [rows, experts_per_token]: experts, and where the row lies among theirs
    std::vector<float> shares;
    std::vector<Group> groups;  // of those experts that have rows
    Inputs grouped, expanded;
    Floats results;

    void reserve(int64_t rows, const Layer& layer, const Model& model, bool as_bf16) {
        const int64_t pairs = rows * model.experts_per_token;
        const int64_t in_tiles = pairs + std::min(pairs, model.num_experts) * (LANES - 1);
        if (pairs > static_cast<int64_t>(chosen.size())) {
            logits.resize(rows * model.num_experts);
            chosen.resize(pairs);
            places.resize(pairs);
            shares.resize(pairs);
            results.resize(in_tiles * model.hidden_size);
        }
        grouped.reserve(in_tiles, model.hidden_size, as_bf16);
        expanded.reserve(in_tiles, layer.expert_down.in_features, as_bf16);
    }

    // All threads together: adds to `out` [rows, hidden_size] what the experts make of `inputs`, by `logits`.
    void add_to(float* out, Inputs& inputs, int64_t rows, const Layer& layer, const Model& model) {
        const int64_t count = model.experts_per_token, size = model.hidden_size;
        const auto share_rows = [&](auto&& work) {
            pool->share((rows + 7) / 8, [&](int64_t task) {
                for (int64_t row = task * 8; row < std::min(rows, task * 8 + 8); ++row) {
                    work(row);
                }
            });
        };
        share_rows([&](int64_t row) {
            choose(&logits[row * model.num_experts], model.num_experts, count, model.normalises, &chosen[row * count],
                   &shares[row * count]);
        });
        pool->share(1, [&](int64_t) { group(rows * count, model.num_experts); });
        share_rows([&](int64_t row) {
            for (int64_t i = row * count; i < (row + 1) * count; ++i) {
                inputs.copy_row(row, grouped, places[i]);
            }
        });
        expand(grouped, groups, layer.expert_up, model, expanded);
        multiply_to(expanded, groups, layer.expert_down, model.is_bf16, results.data(), size, false);
        share_rows([&](int64_t row) {
            for (int64_t column = 0; column < size; column += LANES) {
                const Mask mask = lanes(size - column);
                Vector sum = load(out + row * size + column, mask);
                for (int64_t i = row * count; i < (row + 1) * count; ++i) {
                    const Vector result = load(&results[places[i] * size + column], mask);
                    sum = fma(broadcast(shares[i]), result, sum);
                }
                store(out + row * size + column, sum, mask);
            }
        });
    }

    // By counting: each expert's rows in their order, from a tile's first row on.
    void group(int64_t pairs, int64_t experts) {
        std::vector<int64_t> next(experts);
        for (int64_t i = 0; i < pairs; ++i) {
            ++next[chosen[i]];
        }
        groups.clear();
        for (int64_t expert = 0, end = 0; expert < experts; ++expert) {
            if (const int64_t rows = std::exchange(next[expert], end)) {
                groups.push_back({end, rows, expert});
                end = round_up(end + rows, LANES);
            }
        }
        for (int64_t i = 0; i < pairs; ++i) {
            places[i] = next[chosen[i]]++;
        }
    }
};

}  // namespace sarathi
