// Bulk copies and tensor maps: what the async proxy moves between global and shared memory.
#pragma once

#include "barriers.hpp"

constexpr int TENSOR_DIMS = 5;

// A tensor map of 128 bytes, in the hardware's own form, as the CuTe DSL's host code writes it for tiled copies.
struct TensorMap {
  uint64_t address = 0, strides[TENSOR_DIMS] = {};  // bytes; the first stride is an element
  uint32_t dims = 0, swizzle = 0, element = 0, sizes[TENSOR_DIMS] = {}, box[TENSOR_DIMS] = {};

  explicit TensorMap(const uint64_t* words) {
    constexpr uint32_t kinds[16] = {1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4, 0, 0, 0};
    const auto head = static_cast<uint32_t>(words[1]);
    address = words[0];
    dims = (head >> 4 & 7) + 1;
    element = kinds[head >> 7 & 15];
    swizzle = head >> 13 & 3;
    const bool plain = !(head >> 11 & 3) && !(words[3] >> 32) && !(words[6] >> 32 & 0xffffff);
    if (!element || dims > TENSOR_DIMS || !plain) fault("a tensor map of an unknown form");
    strides[0] = element;
    const auto* halves = reinterpret_cast<const uint32_t*>(words);
    for (uint32_t axis = 1; axis < dims; ++axis) strides[axis] = static_cast<uint64_t>(halves[2 + axis]) << 4;
    for (uint32_t axis = 0; axis < dims; ++axis) sizes[axis] = halves[8 + axis] + 1;
    box[0] = (words[6] >> 56) + 1;
    for (uint32_t axis = 1; axis < dims; ++axis) box[axis] = (words[7] >> (8 * (axis - 1)) & 255) + 1;
  }

  uint64_t bytes() const {
    uint64_t product = element;
    for (uint32_t axis = 0; axis < dims; ++axis) product *= box[axis];
    return product;
  }

  uint32_t swizzled(uint32_t offset) const {
    const uint32_t mask = (1u << swizzle) - 1;
    return offset ^ (offset >> 7 & mask) << 4;
  }

  // Every element of the box: its place in shared memory, and its address in global memory, or 0 outside of the tensor.
  template <class Visit>
  void each(const int32_t* at, uint32_t shared, Visit visit) const {
    int32_t index[TENSOR_DIMS] = {};
    const uint64_t count = bytes() / element;
    for (uint64_t i = 0; i < count; ++i) {
      uint64_t from = address;
      bool inside = true;
      for (uint32_t axis = 0; axis < dims; ++axis) {
        const int64_t position = static_cast<int64_t>(at[axis]) + index[axis];
        inside = inside && position >= 0 && position < sizes[axis];
        from += static_cast<uint64_t>(position) * strides[axis];
      }
      visit(swizzled(shared + static_cast<uint32_t>(i) * element), inside ? from : 0);
      for (uint32_t axis = 0; axis < dims && ++index[axis] == static_cast<int32_t>(box[axis]); ++axis) index[axis] = 0;
    }
  }
};

// Into shared memory, at some later time; the bytes then count at the mbarrier.
inline void load_tensor(Warp& warp, int lane, const TensorMap& map, const int32_t* at, uint32_t to, uint32_t barrier) {
  must_have_waited(warp);
  Cluster& cluster = *warp.block->cluster;
  check_proxy(warp, lane, to, map.bytes(), "a copy writes over");
  const Clock known = note_copy(warp, lane, owner(cluster, to), offset_of(to), map.bytes());
  aligned(offset_of(to), map.swizzle ? 128 : 16);
  barrier_at(cluster, barrier);
  struct Place {
    int32_t at[TENSOR_DIMS];
  } place;
  std::copy(at, at + TENSOR_DIMS, place.at);
  cluster.copies.push_back({[&cluster, map, place, to, barrier, known] {
    map.each(place.at, to, [&](uint32_t shared_address, uint64_t from) {
      uint8_t* memory = shared(cluster, shared_address, map.element);
      if (from)
        std::memcpy(memory, cluster.machine->global(from, map.element, false), map.element);
      else
        std::memset(memory, 0, map.element);
    });
    join(handed_on(cluster, barrier), known);
    complete(cluster, barrier, static_cast<int64_t>(map.bytes()));
  }});
}

inline void load_bulk(Warp& warp, int lane, uint64_t from, uint32_t to, uint32_t bytes, uint32_t barrier) {
  must_have_waited(warp);
  Cluster& cluster = *warp.block->cluster;
  if (bytes) check_proxy(warp, lane, to, bytes, "a copy writes over");
  const Clock known = note_copy(warp, lane, owner(cluster, to), offset_of(to), bytes);
  aligned(from | offset_of(to) | bytes, 16);
  barrier_at(cluster, barrier);
  cluster.copies.push_back({[&cluster, from, to, bytes, barrier, known] {
    if (bytes) std::memcpy(shared(cluster, to, bytes), cluster.machine->global(from, bytes, false), bytes);
    join(handed_on(cluster, barrier), known);
    complete(cluster, barrier, bytes);
  }});
}

// What a store of the async proxy reads must still be the same when the store is waited for.
inline void keep_until_waited(Warp& warp, int lane, uint32_t from, uint32_t bytes) {
  Cluster& cluster = *warp.block->cluster;
  check_proxy(warp, lane, from, bytes, "a bulk store reads");
  note_read(warp, access_by(warp, 1u << lane), owner(cluster, from), offset_of(from), bytes, "a bulk store");
  const uint64_t before = hash_bytes(shared(cluster, from, bytes), bytes, from);
  warp.open_bulk[lane].checks.push_back([&warp, &cluster, lane, from, bytes, before] {
    note_read(warp, access_by(warp, 1u << lane), owner(cluster, from), offset_of(from), bytes, "a bulk store");  // until now
    if (hash_bytes(shared(cluster, from, bytes), bytes, from) != before)
      cluster.machine->hazards.insert("shared memory is written again before a bulk store has read it");
  });
}

inline void store_bulk(Warp& warp, int lane, uint64_t to, uint32_t from, uint32_t bytes, int add) {
  must_have_waited(warp);
  aligned(to | offset_of(from) | bytes, 16);
  if (!bytes) return;
  keep_until_waited(warp, lane, from, bytes);
  uint8_t* memory = machine(warp).global(to, bytes, true);
  const uint8_t* source = shared(*warp.block->cluster, from, bytes);
  if (!add) {
    std::memcpy(memory, source, bytes);
    return;
  }
  if (add == 2) {
    auto* sums = reinterpret_cast<uint32_t*>(memory);
    const auto* terms = reinterpret_cast<const uint32_t*>(source);
    for (uint32_t i = 0; i < bytes / 4; ++i) sums[i] += terms[i];
    return;
  }
  auto* sums = reinterpret_cast<float*>(memory);
  const auto* terms = reinterpret_cast<const float*>(source);
  for (uint32_t i = 0; i < bytes / 4; ++i) sums[i] += terms[i];
}

inline void store_tensor(Warp& warp, int lane, const TensorMap& map, const int32_t* at, uint32_t from, bool add) {
  must_have_waited(warp);
  keep_until_waited(warp, lane, from, static_cast<uint32_t>(map.bytes()));
  map.each(at, from, [&](uint32_t shared_address, uint64_t to) {
    if (!to) return;
    uint8_t* memory = machine(warp).global(to, map.element, true);
    const uint8_t* source = shared(*warp.block->cluster, shared_address, map.element);
    if (add)
      *reinterpret_cast<float*>(memory) += *reinterpret_cast<const float*>(source);
    else
      std::memcpy(memory, source, map.element);
  });
}

inline void wait_bulk(Warp& warp, int lane, size_t left) {
  auto& groups = warp.bulk_groups[lane];
  while (groups.size() > left) {
    for (auto& check : groups.front().checks) check();
    groups.erase(groups.begin());
  }
}
