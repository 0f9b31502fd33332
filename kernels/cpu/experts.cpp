// Mixture of experts: which ones a token goes to, its way there, and back.
//
// NOTE: everything about a row depends on that row alone, so that it has the same bits in any batch.
#include "kernels.h"
#include "vec.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace pdserve {
namespace {

constexpr int64_t kMinRows = 8;  // of a thread's share

// The `count` largest of `values`, the largest first, the first of equals first. With NaN among them
// they are different and in range, and which is not said.
void largest(const float* values, int64_t size, int64_t count, int64_t* ids) {
  int64_t found = 0;
  for (int64_t i = 0; i < size; ++i) {
    if (found == count && !(values[i] > values[ids[count - 1]])) continue;
    int64_t place = found < count ? found++ : count - 1;
    for (; place > 0 && values[i] > values[ids[place - 1]]; --place) ids[place] = ids[place - 1];
    ids[place] = i;
  }
}

// Softmax, or the sigmoid of each.
void score(const float* logits, int64_t size, bool is_sigmoid, float* scores) {
  if (is_sigmoid) {
    for (int64_t i = 0; i < size; ++i) scores[i] = 1.f / (1.f + std::exp(-logits[i]));
    return;
  }
  const float highest = *std::max_element(logits, logits + size);
  float sum = 0.f;
  for (int64_t i = 0; i < size; ++i) sum += scores[i] = std::exp(logits[i] - highest);
  for (int64_t i = 0; i < size; ++i) scores[i] /= sum;
}

class Router {
 public:
  explicit Router(const GatingArgs& args)
      : args_(args),
        group_size_(args.num_experts / args.num_groups),
        scores_(args.num_experts),
        choice_(args.num_experts),
        group_scores_(args.num_groups),
        best_groups_(args.num_groups) {}

  void route(int64_t row) {
    score(args_.logits + row * args_.ld, args_.num_experts, args_.is_sigmoid, scores_.data());
    for (int64_t i = 0; i < args_.num_experts; ++i)
      choice_[i] = scores_[i] + (args_.bias ? args_.bias[i] : 0.f);
    if (args_.num_groups > 1) keep_best_groups();
    int64_t* ids = args_.ids + row * args_.k;
    largest(choice_.data(), args_.num_experts, args_.k, ids);
    weigh(ids, args_.weights + row * args_.k);
  }

 private:
  void keep_best_groups() {
    for (int64_t group = 0; group < args_.num_groups; ++group) {
      int64_t best[2];
      const float* choice = choice_.data() + group * group_size_;
      largest(choice, group_size_, args_.is_top2_sum ? 2 : 1, best);
      group_scores_[group] = choice[best[0]] + (args_.is_top2_sum ? choice[best[1]] : 0.f);
    }
    largest(group_scores_.data(), args_.num_groups, args_.num_groups_per_tok, best_groups_.data());
    const auto end = best_groups_.begin() + args_.num_groups_per_tok;
    for (int64_t group = 0; group < args_.num_groups; ++group)
      if (std::find(best_groups_.begin(), end, group) == end)
        std::fill_n(choice_.begin() + group * group_size_, group_size_, kMinusInf);
  }

  void weigh(const int64_t* ids, float* weights) const {
    float sum = 0.f;
    for (int64_t i = 0; i < args_.k; ++i) sum += weights[i] = scores_[ids[i]];
    for (int64_t i = 0; i < args_.k; ++i) {
      if (args_.is_normalized) weights[i] /= sum + 1e-20f;
      weights[i] *= args_.scaling_factor;
    }
  }

  const GatingArgs& args_;
  const int64_t group_size_;
  std::vector<float> scores_, choice_, group_scores_;
  std::vector<int64_t> best_groups_;
};

void add_scaled(const float* from, float factor, int64_t dim, float* to) {
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes)
    at::vec::fmadd(Vec::loadu(from + d), Vec(factor), Vec::loadu(to + d)).store(to + d);
  for (; d < dim; ++d) to[d] = std::fma(from[d], factor, to[d]);
}

}  // namespace

void route(const GatingArgs& args) {
  parallel_even(args.rows, kMinRows, [&](int64_t begin, int64_t end) {
    Router router(args);
    for (int64_t row = begin; row < end; ++row) router.route(row);
  });
}

void sort_by_expert(const ExpertRows& rows, const Ids& ids, int64_t num_experts, int64_t* index,
                    int64_t* sizes) {
  std::fill_n(sizes, num_experts, 0);
  for (int64_t i = 0; i < ids.count; ++i) ++sizes[ids[i]];
  std::vector<int64_t> next(num_experts, 0);
  for (int64_t expert = 1; expert < num_experts; ++expert)
    next[expert] = next[expert - 1] + sizes[expert - 1];
  for (int64_t i = 0; i < ids.count; ++i) index[next[ids[i]]++] = i;
  const int64_t k = rows.num_tokens ? ids.count / rows.num_tokens : 1;
  parallel_even(ids.count, kMinRows, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      std::memcpy(rows.out + i * rows.dim, rows.x + index[i] / k * rows.ld,
                  rows.dim * sizeof(float));
  });
}

void sum_of_experts(const float* rows, int64_t dim, const int64_t* index, const float* weights,
                    int64_t num_tokens, int64_t k, float* out) {
  std::vector<int64_t> places(num_tokens * k);  // of each choice, among the rows
  for (int64_t i = 0; i < num_tokens * k; ++i) places[index[i]] = i;
  parallel_even(num_tokens, kMinRows, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      // NOTE: in the order of choice, not of experts: those may be numbered anew when they move.
      float* to = out + token * dim;
      std::fill_n(to, dim, 0.f);
      for (int64_t choice = token * k; choice < (token + 1) * k; ++choice)
        add_scaled(rows + places[choice] * dim, weights[choice], dim, to);
    }
  });
}

void add(const float* x, const float* y, int64_t count, float* out) {
  parallel_even(count, 4096, [&](int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes)
      (Vec::loadu(x + i) + Vec::loadu(y + i)).store(out + i);
    for (; i < end; ++i) out[i] = x[i] + y[i];
  });
}

}  // namespace pdserve
