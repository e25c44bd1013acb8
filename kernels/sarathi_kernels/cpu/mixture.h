// A mixture of experts: each row passes the few experts that a router chooses for it. The rows of one expert are brought
// together, so that its weights are read once for all of them and all threads share the work of all experts.
#pragma once

#include <cmath>
#include <utility>

#include "linear.h"

namespace sarathi {

struct Choice {
    int64_t expert, place;  // and where the row lies among the expert's
    float share;
};

// The experts of the largest logits, the first of equals, and their shares: of the softmax over all experts, or over the
// chosen ones if `normalises`. A logit that is not a number counts as the largest, so that the row is none either.
inline void choose(const float* logits, int64_t experts, bool normalises, std::span<Choice> chosen) {
    const int64_t count = static_cast<int64_t>(chosen.size());
    for (int64_t expert = 0; expert < experts; ++expert) {
        int64_t at = std::min(expert, count);
        while (at > 0 && !(logits[expert] <= logits[chosen[at - 1].expert])) {
            --at;
        }
        if (at < count) {
            std::shift_right(chosen.begin() + at, chosen.end(), 1);
            chosen[at].expert = expert;
        }
    }
    const float most = logits[chosen[0].expert];
    float sum = 0.0f;
    for (int64_t i = 0; i < (normalises ? count : experts); ++i) {
        sum += std::exp(logits[normalises ? chosen[i].expert : i] - most);
    }
    for (Choice& choice : chosen) {
        choice.share = std::exp(logits[choice.expert] - most) / sum;
    }
}

// What a mixture works on; of the layers one after the other.
struct Mixture {
    Floats logits;  // [rows, experts]
    std::vector<Choice> choices;  // [rows, experts_per_token]
    std::vector<Group> groups;  // of those experts that have rows
    Inputs grouped, expanded;
    Floats results;

    void reserve(int64_t rows, const Layer& layer, const Model& model, bool as_bf16) {
        const int64_t pairs = rows * model.experts_per_token;
        const int64_t in_tiles = pairs + std::min(pairs, model.num_experts) * (LANES - 1);
        AttentionScratch::grow(logits, rows * model.num_experts);
        AttentionScratch::grow(results, in_tiles * model.hidden_size);
        choices.resize(pairs);
        grouped.reserve(in_tiles, model.hidden_size, as_bf16);
        expanded.reserve(in_tiles, layer.expert_down.in_features, as_bf16);
    }

    // All threads together: adds to `out` [rows, hidden_size] what the experts make of `inputs`, by `logits`.
    void add_to(float* out, Inputs& inputs, int64_t rows, const Layer& layer, const Model& model) {
        const int64_t experts = model.num_experts, size = model.hidden_size;
        const auto of_row = [&](int64_t row) {
            return std::span(choices).subspan(row * model.experts_per_token, model.experts_per_token);
        };
        pool->share_rows(rows, [&](int64_t row) {
            choose(&logits[row * experts], experts, model.normalises, of_row(row));
        });
        pool->share(1, [&](int64_t) { group(std::span(choices).first(rows * model.experts_per_token), experts); });
        pool->share_rows(rows, [&](int64_t row) {
            for (const Choice& choice : of_row(row)) {
                inputs.copy_row(row, grouped, choice.place);
            }
        });
        expand(grouped, groups, layer.expert_up, model, expanded);
        multiply_to(expanded, groups, layer.expert_down, model.is_bf16, results.data(), false);
        pool->share_rows(rows, [&](int64_t row) {
            for (int64_t column = 0; column < size; column += LANES) {
                const Mask mask = lanes(size - column);
                Vector sum = load(out + row * size + column, mask);
                for (const Choice& choice : of_row(row)) {
                    sum = fma(broadcast(choice.share), load(&results[choice.place * size + column], mask), sum);
                }
                store(out + row * size + column, sum, mask);
            }
        });
    }

    // By counting: each expert's rows in their order, from a tile's first row on.
    void group(std::span<Choice> pairs, int64_t experts) {
        std::vector<int64_t> next(experts);
        for (const Choice& choice : pairs) {
            ++next[choice.expert];
        }
        groups.clear();
        for (int64_t expert = 0, end = 0; expert < experts; ++expert) {
            if (const int64_t rows = std::exchange(next[expert], end)) {
                groups.push_back({end, rows, expert});
                end = round_up(end + rows, LANES);
            }
        }
        for (Choice& choice : pairs) {
            choice.place = next[choice.expert]++;
        }
    }
};

}  // namespace sarathi
