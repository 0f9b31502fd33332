// The one matrix product all kernels share: C[rows, cols] (+)= A[rows, depth] B[depth, cols].
//
// A is read by broadcast, B by vectors along its columns, and every element of C is one chain of
// fused multiply-adds over depth in ascending order. NOTE: an element's value therefore does not
// depend on how rows are grouped into tiles, nor on depth being cut into blocks that continue from
// C: results are the same bits in every batch.
#pragma once

#include "vec.h"

#include <array>
#include <utility>

namespace pdserve {

// Which cache to prefetch into: what is used next, or what a whole item of work lies before.
constexpr int kFirstLevel = 3, kSecondLevel = 2;

// B: float, or int8_t, which becomes float in registers.
template <typename B, int Level = kFirstLevel>
struct ProductOf {
  const float* a;
  int64_t ld_a;
  const B* b;
  int64_t ld_b;
  int64_t depth;
  float* c;
  int64_t ld_c;
  bool is_continued;             // start from what is in c, else from zero
  const char* next_b = nullptr;  // prefetched while this is computed, or null
  int64_t next_bytes = 0;        // of it, over all rows and columns
};

using Product = ProductOf<float>;

template <typename B, int Level, int Rows, int Vecs>
void multiply_tile(const ProductOf<B, Level>& product, int64_t prefetch_step) {
  const ProductOf<B, Level> p = product;
  Register acc[Rows * Vecs];
  Register row[Vecs];
  Register scalar;
  const auto load = [&](auto i) {
    acc[i] = p.is_continued ? Vec::loadu(p.c + i / Vecs * p.ld_c + i % Vecs * kLanes) : Vec(0.f);
  };
  const auto multiply_add = [&](auto i, const float* a, const B* b) {
    constexpr int r = i / Vecs, v = i % Vecs;
    if constexpr (r == 0) row[v] = load_wide(b + v * kLanes);
    if constexpr (v == 0) scalar = Vec(a[r * p.ld_a]);
    acc[i] = at::vec::fmadd(Vec(scalar), Vec(row[v]), Vec(acc[i]));
  };
  const auto store = [&](auto i) {
    Vec(acc[i]).store(p.c + i / Vecs * p.ld_c + i % Vecs * kLanes);
  };
  c10::ForcedUnroll<Rows * Vecs>{}(load);
  const B* b = p.b;
  const char* next_b = p.next_b;
  for (int64_t k = 0; k < p.depth; ++k, b += p.ld_b, next_b += prefetch_step) {
    __builtin_prefetch(next_b, 0, Level);
    if constexpr (Vecs * sizeof(Register) > 64) __builtin_prefetch(next_b + 64, 0, Level);
    c10::ForcedUnroll<Rows * Vecs>{}(multiply_add, p.a + k, b);
  }
  c10::ForcedUnroll<Rows * Vecs>{}(store);
}

template <typename B, int Level>
using TileFn = void (*)(const ProductOf<B, Level>&, int64_t);

template <typename B, int Level, int Vecs, int... Rows>
constexpr std::array<TileFn<B, Level>, sizeof...(Rows)> tiles_of(
    std::integer_sequence<int, Rows...>) {
  return {multiply_tile<B, Level, Rows + 1, Vecs>...};
}

// Vecs * kLanes columns of the product, any number of rows.
template <int Vecs, typename B = float, int Level = kFirstLevel>
void multiply_rows(ProductOf<B, Level> p, int64_t rows) {
  static constexpr auto tiles =
      tiles_of<B, Level, Vecs>(std::make_integer_sequence<int, kTileRows>());
  const int64_t num_tiles = ceil_div<int64_t>(rows, kTileRows);
  // Each tile fetches its share. Without anything to fetch it touches what it reads anyway: an
  // unmapped address would cost a walk through the page tables each time.
  const int64_t step = p.next_b ? p.next_bytes / (p.depth * num_tiles) : 0;
  if (!p.next_b) p.next_b = reinterpret_cast<const char*>(p.b);
  for (int64_t left = num_tiles; left > 0; --left) {
    // Even tiles: 7 + 6 rows keep more FMAs in flight than 12 + 1.
    const int64_t taken = ceil_div(rows, left);
    tiles[taken - 1](p, step);
    rows -= taken;
    p.a += taken * p.ld_a;
    p.c += taken * p.ld_c;
    p.next_b += step * p.depth;
  }
}

// cols must be a multiple of kLanes.
template <typename B = float, int Level = kFirstLevel>
void multiply(ProductOf<B, Level> p, int64_t rows, int64_t cols) {
  if (p.next_b) p.next_bytes = p.next_bytes * kTileCols / std::max<int64_t>(cols, kTileCols);
  for (; cols >= kTileCols; cols -= kTileCols) {
    multiply_rows<kTileVecs, B, Level>(p, rows);
    if (p.next_b) p.next_b += p.next_bytes;
    p.b += kTileCols;
    p.c += kTileCols;
  }
  for (; cols > 0; cols -= kLanes) {
    multiply_rows<1, B, Level>(p, rows);
    p.b += kLanes;
    p.c += kLanes;
  }
}

}  // namespace pdserve
