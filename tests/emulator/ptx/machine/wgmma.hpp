// Products of a warpgroup. Each warp makes its 16 rows at once; when the product is waited for, its operands in shared
// memory must still be what they were.
#pragma once

#include "memory.hpp"

struct Operand {
  uint32_t base = 0;  // in shared memory, without the block's rank
  uint32_t leading = 0, stride = 0, swizzle = 0;  // bytes; swizzle: 0 none, 1 of 128 bytes, 2 of 64, 3 of 32
  bool transposed = false;                        // the rows' axis is contiguous, not K
  int rows = 0, depth = 0, element = 2;           // element: bytes

  Operand(uint64_t descriptor, bool transposed_, int rows_, int depth_, int element_)
      : base((descriptor & 0x3fff) << 4),
        leading((descriptor >> 16 & 0x3fff) << 4),
        stride((descriptor >> 32 & 0x3fff) << 4),
        swizzle(descriptor >> 62),
        transposed(transposed_),
        rows(rows_),
        depth(depth_),
        element(element_) {
    if (descriptor >> 49 & 7) fault("a WGMMA descriptor with a base offset");
  }

  uint32_t span() const { return swizzle ? 256u >> swizzle : 16; }  // bytes that are contiguous before swizzling

  // The place of element (row, k): the canonical layouts of the PTX ISA, "Shared memory matrix layout".
  uint32_t place(int row, int k) const {
    const uint32_t contiguous = (transposed ? row : k) * element, other = transposed ? k : row;
    uint32_t offset;
    if (transposed)
      offset = contiguous / span() * (swizzle ? leading : stride) + other / 8 * (swizzle ? stride : leading);
    else
      offset = contiguous / span() * leading + other / 8 * stride;
    offset += other % 8 * span() + contiguous % span();
    const uint32_t address = base + offset, bits = swizzle ? (8u >> (swizzle - 1)) - 1 : 0;
    return address ^ (address >> 7 & bits) << 4;
  }
};

// A product's operand: the rows that this warp reads, all of B and its own of A, which it may write again when it has
// waited.
struct Product {
  Operand operand;
  int first, count;
  uint64_t before;
  int32_t line;
};

inline const uint8_t* touched(Warp& warp, uint32_t address, int bytes) {
  if (address % WORD == 0) note_read(warp, {warp.products, warp.now, warp.line, ALL_LANES}, *warp.block, offset_of(address), bytes, "a WGMMA");
  return shared(*warp.block->cluster, address, bytes);
}

// The bytes of an operand, which the product reads until it is waited for.
inline uint64_t hash_of(Warp& warp, const Operand& operand, int first, int count) {
  uint64_t hash = 0;
  const uint32_t rank = static_cast<uint32_t>(warp.block->rank) << RANK_SHIFT;
  for (int row = first; row < first + count; ++row)
    for (int k = 0; k < operand.depth; ++k)
      hash = hash_bytes(touched(warp, rank | operand.place(row, k), operand.element), operand.element, hash);
  return hash;
}

// Reads rows, which from now on must not change until the warp has waited for the product.
inline void read_operand(Warp& warp, const Operand& operand, Format format, int first, int count, float* values) {
  const float* decoded = table(format);
  const uint32_t rank = static_cast<uint32_t>(warp.block->rank) << RANK_SHIFT;
  Cluster& cluster = *warp.block->cluster;
  for (int row = 0; row < count; ++row)
    for (int k = 0; k < operand.depth; ++k) {
      const uint32_t address = rank | operand.place(first + row, k);
      const uint8_t* memory = shared(cluster, address, operand.element);
      if (address % GRANULE == 0) check_proxy(warp, 0, address, operand.element, "WGMMA reads");
      values[row * operand.depth + k] =
          decoded[operand.element == 2 ? *reinterpret_cast<const uint16_t*>(memory) : *memory];
    }
  warp.open_products.push_back({operand, first, count, hash_of(warp, operand, first, count), warp.line});
}

struct Shape {
  int columns, depth;
  Format format;
  int element;
};

// D, the accumulator's slots, += A B, where A is `rows` of 16 x depth values of this warp.
inline void accumulate(Warp& warp, const int32_t* d, const float* a, const float* b, const Shape& shape, bool add) {
  for (int lane = 0; lane < LANES; ++lane)
    for (int index = 0; index < shape.columns / 2; ++index) {
      const int row = lane / 4 + index / 2 % 2 * 8, column = index / 4 * 8 + lane % 4 * 2 + index % 2;
      double sum = 0;
      for (int k = 0; k < shape.depth; ++k)
        sum += static_cast<double>(a[row * shape.depth + k]) * b[column * shape.depth + k];
      uint64_t& out = warp.slot(d[index])[lane];
      const float before = add ? bits<float>(static_cast<uint32_t>(out)) : 0.f;
      out = bits<uint32_t>(static_cast<float>(before + sum));
    }
}

// A from registers: element (row, k) of this warp's rows.
inline void fragment(Warp& warp, const int32_t* slots, const Shape& shape, float* a) {
  const float* decoded = table(shape.format);
  const int packed = 4 / shape.element;
  for (int lane = 0; lane < LANES; ++lane)
    for (int part = 0; part < 4; ++part) {
      const auto word = static_cast<uint32_t>(warp.slot(slots[part])[lane]);
      const int row = lane / 4 + part % 2 * 8, k = lane % 4 * packed + part / 2 * 4 * packed;
      for (int i = 0; i < packed; ++i)
        a[row * shape.depth + k + i] = decoded[word >> (i * 8 * shape.element) & (shape.element == 2 ? 0xffff : 0xff)];
    }
}

inline void wait_products(Warp& warp, size_t left) {
  auto& groups = warp.product_groups;
  while (groups.size() > left) {
    for (const Product& product : groups.front())
      if (hash_of(warp, product.operand, product.first, product.count) != product.before)
        machine(warp).hazards.insert("shared memory is written again before a WGMMA (line " + std::to_string(product.line) +
                                     ") has read it");
    groups.erase(groups.begin());
  }
}

inline Warp::Warp() = default;
inline Warp::Warp(Warp&&) noexcept = default;
inline Warp::~Warp() = default;
