// Drawing tokens: what kernels/drawing.py specifies, without sorting a row.
//
// One pass over a row finds the largest score of each chunk of it; whatever is looked for among the
// largest then lies in the few chunks whose largest is large enough. The sum of all weights, where
// it is needed, is a second pass.
//
// NOTE: every row is computed by one thread in one order, so it draws the same token in any batch.
#include "kernels.h"
#include "vec.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

namespace pdserve {
namespace {

constexpr int64_t kChunk = 128;

inline Vec load(const float* from, int64_t live) {
  return live == kLanes ? Vec::loadu(from) : Vec::loadu(from, live);
}

// The largest of `count` floats; those that are NaN do not count.
float largest_of(const float* x, int64_t count) {
  Vec largest(kMinusInf);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vec next = Vec::loadu(x + i);
    largest = Vec::blendv(largest, next, next > largest);
  }
  float result = max_lanes(largest);
  for (; i < count; ++i)
    if (x[i] > result) result = x[i];
  return result;
}

// One row after the other, in the same buffers.
class RowDraw {
 public:
  int64_t draw(const DrawArgs& args, int64_t row) {
    read(args.rows, row, args.inverse_temperature[row]);
    float least = args.log_min_p ? args.log_min_p[row] : kMinusInf;
    const int64_t top_k = args.top_k ? std::max<int64_t>(1, args.top_k[row]) : vocab_size_;
    const double top_p = args.top_p ? args.top_p[row] : 1.;
    if (top_k >= vocab_size_ && top_p >= 1.) return draw_from_all(least, args.numbers[row]);
    if (top_k < vocab_size_) {
      least = std::max(least, kth_largest(top_k));
      collect(least);
      if (top_p < 1.) least = last_of_nucleus(top_p * sum_of_collected(least));
    } else {
      const double total = sum_of_all(least);
      collect(std::max(least, least_in_nucleus(top_p, total)));
      least = last_of_nucleus(top_p * total);
    }
    return draw_from_collected(least, args.numbers[row]);
  }

 private:
  // To be put in order.
  struct Candidate {
    float score, weight;
  };

  int64_t first_of(int64_t chunk) const { return chunk * kChunk; }
  int64_t count_of(int64_t chunk) const {
    return std::min(kChunk, vocab_size_ - first_of(chunk));
  }

  // Of a row; at most 0, but for infinite logits. NOTE: a copy of what they are made of stays in
  // registers, whatever a loop writes.
  struct Scores {
    explicit Scores(const RowDraw& row)
        : logits(row.logits_), highest(row.highest_), inverse(row.inverse_temperature_) {}

    // Those of tokens [i, i + live).
    Vec at(int64_t i, int64_t live) const { return (load(logits + i, live) - highest) * inverse; }

    const float* logits;
    Vec highest, inverse;
  };

  void read(const LogitRows& rows, int64_t row, float inverse_temperature) {
    logits_ = rows.logits + row * rows.ld;
    vocab_size_ = rows.vocab_size;
    num_chunks_ = ceil_div(vocab_size_, kChunk);
    inverse_temperature_ = inverse_temperature;
    largest_.resize(num_chunks_);
    highest_ = std::numeric_limits<float>::lowest();
    for (int64_t chunk = 0; chunk < num_chunks_; ++chunk) {
      largest_[chunk] = largest_of(logits_ + first_of(chunk), count_of(chunk));
      highest_ = std::max(highest_, largest_[chunk]);
    }
    // NOTE: less than infinity, or it would be at a distance from itself that is no number.
    highest_ = std::min(highest_, std::numeric_limits<float>::max());
    for (float& largest : largest_) largest = (largest - highest_) * inverse_temperature;
  }

  // The weights of a chunk, zero where the score is below `least`; returns their sum.
  float weigh(int64_t chunk, float least, float* weights) const {
    const int64_t first = first_of(chunk), count = count_of(chunk);
    const Scores row(*this);
    const Vec bound(least);
    Vec sum(0.f);
    for (int64_t i = 0; i < count; i += kLanes) {
      const int64_t live = std::min<int64_t>(kLanes, count - i);
      const Vec scores = row.at(first + i, live);
      Vec kept = Vec::blendv(Vec(0.f), scores.exp_u20(), scores >= bound);
      if (live < kLanes) kept = Vec::set(Vec(0.f), kept, live);
      kept.store(weights + i);
      sum = sum + kept;
    }
    return sum_lanes(sum);
  }

  double sum_of_all(float least) {
    sums_.resize(num_chunks_);
    double total = 0.;
    for (int64_t chunk = 0; chunk < num_chunks_; ++chunk) {
      alignas(64) float weights[kChunk];
      sums_[chunk] = largest_[chunk] >= least ? weigh(chunk, least, weights) : 0.f;
      total += sums_[chunk];
    }
    return total;
  }

  int64_t draw_from_all(float least, double number) {
    const double target = number * sum_of_all(least);
    double before = 0.;
    int64_t found = num_chunks_ - 1;
    for (int64_t chunk = 0; chunk < num_chunks_; ++chunk) {
      if (sums_[chunk] <= 0.f) continue;
      found = chunk;
      if (before + sums_[chunk] > target) break;
      before += sums_[chunk];
    }
    alignas(64) float weights[kChunk];
    weigh(found, least, weights);
    int64_t token = vocab_size_ - 1;
    for (int64_t i = 0; i < count_of(found); ++i) {
      if (weights[i] <= 0.f) continue;
      token = first_of(found) + i;
      before += weights[i];
      if (before > target) break;
    }
    return token;
  }

  // Scores that are at least this include the k largest: so many chunks have one.
  float kth_largest(int64_t k) {
    float bound = kMinusInf;
    if (k <= num_chunks_) {
      order_ = largest_;
      bound = kth_of_order(k);
    }
    find(bound);
    if (num_found_ <= k) return bound;
    order_.assign(scores_.begin(), scores_.begin() + num_found_);
    return kth_of_order(k);
  }

  float kth_of_order(int64_t k) {
    std::nth_element(order_.begin(), order_.begin() + (k - 1), order_.end(), std::greater<>());
    return order_[k - 1];
  }

  // A score that a nucleus certainly reaches down to: all that are less add up to less than what it
  // leaves out. NOTE: the margin is more than what the exponential and the logarithm round.
  float least_in_nucleus(double top_p, double total) const {
    constexpr double kMargin = 1e-3;
    const double left = (1. - top_p) * total / static_cast<double>(vocab_size_);
    return static_cast<float>(std::log(left) - kMargin);
  }

  // tokens_, scores_: all whose score is at least `least`, in their order in the row.
  void find(float least) {
    // One place more, for what is written and then not counted.
    if (static_cast<int64_t>(tokens_.size()) <= vocab_size_) {
      tokens_.resize(vocab_size_ + 1);
      scores_.resize(vocab_size_ + 1);
    }
    constexpr int kNoLane = (1 << kLanes) - 1;
    const Scores row(*this);
    const Vec bound(least);
    int32_t* token = tokens_.data();
    float* kept = scores_.data();
    for (int64_t chunk = 0; chunk < num_chunks_; ++chunk) {
      if (!(largest_[chunk] >= least)) continue;
      const int64_t end = first_of(chunk) + count_of(chunk);
      for (int64_t i = first_of(chunk); i < end; i += kLanes) {
        const int64_t live = std::min<int64_t>(kLanes, end - i);
        const Vec scores = row.at(i, live);
        if ((scores >= bound).zero_mask() == kNoLane) continue;
        float lanes[kLanes];
        scores.store(lanes);
        for (int64_t j = 0; j < live; ++j) {
          *token = static_cast<int32_t>(i + j);
          *kept = lanes[j];
          const bool is_kept = lanes[j] >= least;
          token += is_kept;
          kept += is_kept;
        }
      }
    }
    num_found_ = kept - scores_.data();
  }

  // The same, and weights_.
  void collect(float least) {
    find(least);
    if (weights_.size() < scores_.size() + kLanes) weights_.resize(scores_.size() + kLanes);
    for (int64_t i = 0; i < num_found_; i += kLanes) {
      const int64_t live = std::min<int64_t>(kLanes, num_found_ - i);
      load(scores_.data() + i, live).exp_u20().store(weights_.data() + i);
    }
  }

  double sum_of_collected(float least) const {
    double sum = 0.;
    for (int64_t i = 0; i < num_found_; ++i)
      if (scores_[i] >= least) sum += weights_[i];
    return sum;
  }

  // The score at which the sum of weights, largest first, reaches `mass`: the bin of scores that
  // it lies in, then halves of that.
  float last_of_nucleus(double mass) {
    if (num_found_ == 0) return kMinusInf;
    constexpr int kBins = 256;
    constexpr float kNarrowest = 1e-6f, kWidest = 128.f;  // beyond it weights are zero
    const float lowest = *std::min_element(scores_.begin(), scores_.begin() + num_found_);
    const float bins = (kBins - 1) / std::clamp(-lowest, kNarrowest, kWidest);
    const auto bin_of = [&](float score) {
      return static_cast<int>(std::clamp(-score, 0.f, kWidest) * bins);
    };
    double sums[kBins] = {};
    for (int64_t i = 0; i < num_found_; ++i) sums[bin_of(scores_[i])] += weights_[i];
    int bin = 0;
    for (; bin < kBins - 1 && sums[bin] < mass; ++bin) mass -= sums[bin];
    ordered_.clear();
    for (int64_t i = 0; i < num_found_; ++i)
      if (bin_of(scores_[i]) == bin) ordered_.push_back({scores_[i], weights_[i]});
    auto begin = ordered_.begin(), end = ordered_.end();
    while (end - begin > 1) {
      const auto middle = begin + (end - begin) / 2;
      std::nth_element(begin, middle, end, [](const Candidate& a, const Candidate& b) {
        return a.score > b.score;
      });
      const double upper = std::accumulate(
          begin, middle, 0., [](double sum, const Candidate& c) { return sum + c.weight; });
      if (upper >= mass) {
        end = middle;
      } else {
        mass -= upper;
        begin = middle;
      }
    }
    return begin == ordered_.end() ? lowest : begin->score;
  }

  int64_t draw_from_collected(float least, double number) const {
    const double target = number * sum_of_collected(least);
    double sum = 0.;
    int64_t token = vocab_size_ - 1;
    for (int64_t i = 0; i < num_found_; ++i) {
      if (!(scores_[i] >= least) || weights_[i] <= 0.f) continue;
      token = tokens_[i];
      sum += weights_[i];
      if (sum > target) break;
    }
    return token;
  }

  const float* logits_ = nullptr;
  int64_t vocab_size_ = 0, num_chunks_ = 0;
  float inverse_temperature_ = 1.f, highest_ = 0.f;
  std::vector<float> largest_, sums_;  // by chunk; scores, weights
  std::vector<int32_t> tokens_;
  std::vector<float> scores_, weights_;
  int64_t num_found_ = 0;  // of the three
  std::vector<float> order_;
  std::vector<Candidate> ordered_;
};

// The first of the largest; 0 where none is larger than -inf.
int64_t argmax_of(const float* x, int64_t count) {
  float highest = kMinusInf;
  int64_t found = 0;
  for (int64_t first = 0; first < count; first += kChunk) {
    const float largest = largest_of(x + first, std::min(kChunk, count - first));
    if (largest > highest) {
      highest = largest;
      found = first;
    }
  }
  while (found < count && x[found] != highest) ++found;
  return found < count ? found : 0;
}

}  // namespace

void draw(const DrawArgs& args) {
  parallel_dynamic(args.rows.count, 1, [&](int64_t begin, int64_t end) {
    // NOTE: kept, for buffers of this size would be new pages each time.
    thread_local RowDraw row_draw;
    for (int64_t row = begin; row < end; ++row) args.tokens[row] = row_draw.draw(args, row);
  });
}

void argmax(const LogitRows& rows, int64_t* tokens) {
  parallel_dynamic(rows.count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      tokens[row] = argmax_of(rows.logits + row * rows.ld, rows.vocab_size);
  });
}

}  // namespace pdserve
