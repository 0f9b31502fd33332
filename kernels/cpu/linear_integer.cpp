// y = x W^T + b with W in 4 or 8 bits, see quantized.h, and x rounded, see activations.h.
//
// Products of integers are summed over a run of inputs, exact; then they become floats, get their
// scales, and join the sum of the runs before.
//
// NOTE: that sum is one chain of multiply-adds in ascending order, whatever the batch and the tile:
// the same bits, also with other instructions that fuse them (all but those of x86 without AVX2).
#include "activations.h"
#include "integers.h"
#include "panels.h"
#include "prefetch.h"
#include "quantized.h"

#include <array>
#include <cstddef>
#include <vector>

namespace pdserve {
namespace {

#define PDSERVE_INLINE __attribute__((always_inline))

constexpr int64_t kMaxRows = 512;               // that are rounded at a time
constexpr int64_t kRowBlockBytes = 256 * 1024;  // of rounded rows: half a second-level cache
constexpr int64_t kPanelBlockBytes = 128 * 1024;  // beside them
constexpr int64_t kBytesAhead = 4096;  // how far whoever reads a panel fetches ahead

template <int InputBits>
constexpr int kWordSteps = InputBits == 16 ? 4 : 2;

// Rounded rows.
struct Rows {
  const uint8_t* values;
  int64_t ld_values;
  const float* factors;
  int64_t ld_factors;

  void advance(int64_t rows) {
    values += rows * ld_values;
    factors += rows * ld_factors;
  }
};

// Scales, then offsets, of a panel's columns.
struct ColumnFactors {
  alignas(64) float values[2 * kTileCols];
};

// What a panel and a tile of rows add up to. NOTE: rows of the output itself are often a multiple
// of a page apart, and would drive one another out of the first-level cache.
struct Totals {
  alignas(64) float values[kTileRows * kTileCols];
};

template <int InputBits>
inline Ints add_step(const Ints& sums, const Ints& weights, const Ints& inputs) {
  if constexpr (InputBits == 16)
    return add_pairs(sums, weights, inputs);
  else
    return add_quads(sums, weights, inputs);
}

// Integer sums of a tile, [Count][kTileVecs], are arrays in whoever needs them. NOTE: GCC keeps
// those of a class in memory.
template <int Count>
PDSERVE_INLINE inline void clear(Ints* sums) {
  c10::ForcedUnroll<Count * kTileVecs>{}([&](auto i) PDSERVE_INLINE { sums[i] = zero_ints(); });
}

// weights: kTileVecs registers. x: a step of the first row.
template <int InputBits, int Count>
PDSERVE_INLINE inline void add_products(const Ints* weights, const uint8_t* x, int64_t ld_x,
                                        Ints* sums) {
  c10::ForcedUnroll<Count>{}([&](auto r) PDSERVE_INLINE {
    int32_t step;
    std::memcpy(&step, x + r * ld_x, sizeof(step));
    const Ints inputs = broadcast(step);
    c10::ForcedUnroll<kTileVecs>{}([&](auto v) PDSERVE_INLINE {
      Ints& sum = sums[r * kTileVecs + v];
      sum = add_step<InputBits>(sum, weights[v], inputs);
    });
  });
}

// totals += sums * scales + offsets.
template <int InputBits, bool HasOffset, int Count>
PDSERVE_INLINE inline void scale(const Ints* sums, const ColumnFactors& columns, const Rows& rows,
                                 float* totals) {
  c10::ForcedUnroll<Count>{}([&](auto r) PDSERVE_INLINE {
    const float* factor = rows.factors + r * rows.ld_factors;
    c10::ForcedUnroll<kTileVecs>{}([&](auto v) PDSERVE_INLINE {
      Ints sum = sums[r * kTileVecs + v];
      if constexpr (InputBits == 8) sum = sum_of_quads(sum);
      float* to = totals + r * kTileCols + v * kLanes;
      const float* column = columns.values + v * kLanes;
      const Vec both = Vec::loadu(column) * Vec(factor[0]);
      Vec total = at::vec::fmadd(to_floats(sum), both, Vec::loadu(to));
      if constexpr (HasOffset)
        total = at::vec::fmadd(Vec::loadu(column + kTileCols), Vec(factor[1]), total);
      total.store(to);
    });
  });
}

// Calls f(step, kTileVecs registers) for the steps of a word. At a group's end there may be less of
// it with 8 bits: `inputs`.
template <int Bits, int InputBits, typename F>
PDSERVE_INLINE inline void widen_word(const uint8_t* from, int64_t inputs, const F& f) {
  if constexpr (Bits == 4) {
    Ints words[kTileVecs];
    for (int v = 0; v < kTileVecs; ++v) words[v] = load_ints(from + v * kLanes * 4);
    const Ints mask = broadcast(InputBits == 16 ? 0x000f000f : 0x0f0f0f0f);
    c10::ForcedUnroll<kWordSteps<InputBits>>{}([&](auto i) PDSERVE_INLINE {
      Ints weights[kTileVecs];
      for (int v = 0; v < kTileVecs; ++v) weights[v] = both(shifted<4 * i>(words[v]), mask);
      f(i, weights);
    });
  } else {
    static_assert(InputBits == 16);
    alignas(64) uint8_t filled[kWordInputs * kTileCols];
    if (inputs < kWordInputs) {
      std::memset(filled, 0, sizeof(filled));
      std::memcpy(filled, from, inputs * kTileCols);
      from = filled;
    }
    c10::ForcedUnroll<kWordSteps<InputBits>>{}([&](auto i) PDSERVE_INLINE {
      Ints weights[kTileVecs];
      for (int v = 0; v < kTileVecs; ++v) {
        const uint8_t* first = from + i * kTileCols + v * kLanes;
        weights[v] = byte_pairs(first, first + 4 * kTileCols);
      }
      f(i, weights);
    });
  }
}

// Walks over the runs of a panel.
template <int Bits, int InputBits>
class PanelRuns {
 public:
  static constexpr int64_t kWordBytes = kWordInputs * kTileCols * Bits / 8;

  PanelRuns(const QuantizedShape& shape, const uint8_t* panel) : shape_(shape), next_(panel) {}

  bool has_runs() const { return first_ < shape_.in_features; }

  // Of the run that was read last.
  const ColumnFactors& columns() const { return columns_; }

  // Calls f(word's bytes, inputs left) for each word of the next run.
  template <typename F>
  PDSERVE_INLINE void read(const F& f) {
    if (group_left_ == 0) open_group();
    const int64_t inputs = std::min(kRunInputs<InputBits>, group_left_);
    for (int64_t left = inputs; left > 0; left -= kWordInputs) {
      f(next_, left);
      next_ += Bits == 4 ? kWordBytes : std::min(kWordInputs, left) * kTileCols;
    }
    group_left_ -= inputs;
    first_ += inputs;
  }

 private:
  void open_group() {
    group_left_ = std::min(shape_.group_size, shape_.in_features - first_);
    for (int v = 0; v < (shape_.has_offset ? 2 : 1) * kTileVecs; ++v)
      load_factor(next_, shape_.has_half_factors, v).store(columns_.values + v * kLanes);
    const GroupBytes bytes(shape_, group_left_);
    next_ += bytes.whole - bytes.values;
  }

  const QuantizedShape shape_;
  const uint8_t* next_;
  int64_t first_ = 0;       // input of the next run
  int64_t group_left_ = 0;  // inputs of the group that have not been read
  ColumnFactors columns_;
};

// A panel times a tile of rows, each weight in the registers that it was widened in.
template <int Bits, int InputBits, bool HasOffset, int Count>
void multiply_tile(const QuantizedShape& shape, const uint8_t* panel, Rows rows, Totals& totals) {
  constexpr int64_t kWordBytes = PanelRuns<Bits, InputBits>::kWordBytes;
  std::fill_n(totals.values, Count * kTileCols, 0.f);
  PanelRuns<Bits, InputBits> runs(shape, panel);
  while (runs.has_runs()) {
    Ints sums[Count * kTileVecs];
    clear<Count>(sums);
    runs.read([&](const uint8_t* from, int64_t inputs) PDSERVE_INLINE {
      for (int64_t i = 0; i < kWordBytes; i += kCacheLine)
        __builtin_prefetch(from + kBytesAhead + i);
      widen_word<Bits, InputBits>(from, inputs, [&](auto i, const Ints* weights) PDSERVE_INLINE {
        add_products<InputBits, Count>(weights, rows.values + 4 * i, rows.ld_values, sums);
      });
      rows.values += kWordInputs * InputBits / 8;
    });
    scale<InputBits, HasOffset, Count>(sums, runs.columns(), rows, totals.values);
    rows.factors += 2;
  }
}

using TileFn = void (*)(const QuantizedShape&, const uint8_t*, Rows, Totals&);

template <int Bits, int InputBits, bool HasOffset, int... Counts>
constexpr std::array<TileFn, kTileRows> tiles_of(std::integer_sequence<int, Counts...>) {
  return {multiply_tile<Bits, InputBits, HasOffset, Counts + 1>...};
}

template <int Bits, int InputBits, bool HasOffset>
constexpr auto kTiles =
    tiles_of<Bits, InputBits, HasOffset>(std::make_integer_sequence<int, kTileRows>());

// By the number of rows, from 1.
const std::array<TileFn, kTileRows>& tiles_for(const QuantizedShape& shape) {
  if (shape.num_bits == 8) return shape.has_offset ? kTiles<8, 16, true> : kTiles<8, 16, false>;
  if (shape.input_bits == 16) return shape.has_offset ? kTiles<4, 16, true> : kTiles<4, 16, false>;
  return shape.has_offset ? kTiles<4, 8, true> : kTiles<4, 8, false>;
}

// A product, and room for its rounded rows.
struct RoundedProduct {
  QuantizedLinearArgs args;
  int64_t values_bytes, num_factors;  // of a row
  uint8_t* values;
  float* factors;
};

int64_t out_features_of(const RoundedProduct& product) { return product.args.shape.out_features; }

// A tile of rows times panels [begin, end); the last panel may be wider than what is left of out.
void multiply_row_tile(const RoundedProduct& product, TileFn multiply, int64_t row, int64_t count,
                       int64_t begin, int64_t end) {
  const QuantizedLinearArgs& args = product.args;
  const int64_t panel_bytes = quantized_panel_bytes(args.shape), ld_out = args.shape.out_features;
  Rows rows{product.values, product.values_bytes, product.factors, product.num_factors};
  rows.advance(row);
  Totals totals;
  for (int64_t panel = begin; panel < end; ++panel) {
    const int64_t first_col = panel * kTileCols;
    const size_t row_bytes = std::min<int64_t>(kTileCols, ld_out - first_col) * sizeof(float);
    multiply(args.shape, args.packed + panel * panel_bytes, rows, totals);
    if (args.bias) add_bias(args.bias + first_col, kTileCols, count, totals.values, kTileCols);
    float* out = args.out + row * ld_out + first_col;
    for (int64_t r = 0; r < count; ++r)
      std::memcpy(out + r * ld_out, totals.values + r * kTileCols, row_bytes);
  }
}

// Rows stay in the first-level cache while some panels pass over them, and these panels, and a
// block of rows, in the second-level one.
void multiply_panels(const RoundedProduct& product, int64_t begin, int64_t end) {
  const QuantizedShape& shape = product.args.shape;
  const auto& tiles = tiles_for(shape);
  const int64_t num_rows = product.args.rows;
  const int64_t block =
      std::max<int64_t>(8, kRowBlockBytes / product.values_bytes / kTileRows) * kTileRows;
  const int64_t group = std::max<int64_t>(1, kPanelBlockBytes / quantized_panel_bytes(shape));
  for (int64_t first = 0; first < num_rows; first += block)
    for (int64_t panel = begin; panel < end; panel += group) {
      const int64_t stop = std::min(first + block, num_rows);
      for (int64_t row = first; row < stop;) {
        const int64_t count = ceil_div(stop - row, ceil_div<int64_t>(stop - row, kTileRows));
        multiply_row_tile(product, tiles[count - 1], row, count, panel,
                          std::min(panel + group, end));
        row += count;
      }
    }
}

RoundedProduct without_room(const QuantizedLinearArgs& args) {
  RoundedProduct product{args, 0, 0, nullptr, nullptr};
  const int64_t bits = args.shape.input_bits;
  const auto count = [&](int64_t, int64_t inputs) {
    product.values_bytes += round_up(inputs, kWordInputs) * bits / 8;
    product.num_factors += 2;
  };
  bits == 16 ? each_run<16>(args.shape, count) : each_run<8>(args.shape, count);
  return product;
}

void round_rows(const RoundedProduct& product, int64_t begin, int64_t end) {
  const QuantizedLinearArgs& args = product.args;
  const auto round = args.shape.input_bits == 16 ? round_row<16> : round_row<8>;
  for (int64_t row = begin; row < end; ++row)
    round(args.shape, args.x + row * args.ld_x, product.values + row * product.values_bytes,
          product.factors + row * product.num_factors);
}

// Together the products have at most kMaxRows.
void multiply_together(std::vector<RoundedProduct>& products) {
  // NOTE: kept, for an allocation of this size would be new pages each time.
  thread_local std::vector<std::byte> room;
  constexpr int64_t kAlignment = 8;
  int64_t num_bytes = 0, num_rows = 0;
  for (RoundedProduct& product : products) {
    num_bytes += product.args.rows *
                 (product.values_bytes + product.num_factors * int64_t{sizeof(float)});
    num_bytes = round_up(num_bytes, kAlignment);
  }
  if (room.size() < static_cast<size_t>(num_bytes)) room = std::vector<std::byte>(num_bytes);
  std::byte* next = room.data();
  for (RoundedProduct& product : products) {
    product.values = reinterpret_cast<uint8_t*>(next);
    next += product.args.rows * product.values_bytes;  // a multiple of 8
    product.factors = reinterpret_cast<float*>(next);
    next += round_up(product.args.rows * product.num_factors * int64_t{sizeof(float)}, kAlignment);
    num_rows += product.args.rows;
  }
  constexpr int64_t kRowsOfThread = 8;
  parallel_even(num_rows, kRowsOfThread, [&](int64_t begin, int64_t end) {
    int64_t first = 0;
    for (const RoundedProduct& product : products) {
      round_rows(product, std::max(begin - first, int64_t{0}),
                 std::min(end - first, product.args.rows));
      first += product.args.rows;
    }
  });
  each_product(products.data(), products.size(), multiply_panels);
}

}  // namespace

void integer_linear_each(const std::vector<QuantizedLinearArgs>& products) {
  std::vector<RoundedProduct> some;
  int64_t num_rows = 0;
  const auto multiply_some = [&] {
    if (!some.empty()) multiply_together(some);
    some.clear();
    num_rows = 0;
  };
  for (QuantizedLinearArgs left : products)
    while (left.rows > 0) {
      RoundedProduct& product = some.emplace_back(without_room(left));
      const int64_t taken = std::min(left.rows, kMaxRows - num_rows);
      product.args.rows = taken;
      num_rows += taken;
      left.rows -= taken;
      left.x += taken * left.ld_x;
      left.out += taken * left.shape.out_features;
      if (num_rows == kMaxRows) multiply_some();
    }
  multiply_some();
}

}  // namespace pdserve
