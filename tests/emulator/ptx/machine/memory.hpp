// Addresses as memory: global regions with bounds, shared memory with who wrote it last.
#pragma once

#include <utility>

#include "numbers.hpp"
#include "races.hpp"

[[noreturn]] inline void fault(const std::string& text) { throw Fault(text); }

inline const Region* Machine::find(uint64_t address, uint64_t bytes, bool write) const {
  for (const Region& region : regions)
    if (address >= region.base && address + bytes <= region.base + region.size) {
      if (write && !region.writable) fault("writes into " + region.name + ", an input");
      return &region;
    }
  for (const Region& region : regions)
    if (address + bytes > region.base && address < region.base + region.size)
      fault("reaches over the end of " + region.name);
  char text[96];
  std::snprintf(text, sizeof text, "touches %llu bytes at %#llx, outside of all arrays",
                static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(address));
  fault(text);
}

inline Block& owner(Cluster& cluster, uint32_t address) {
  const uint32_t rank = address >> RANK_SHIFT;
  if (rank >= cluster.blocks.size()) fault("a shared address of block " + std::to_string(rank) + " of the cluster");
  Block& block = cluster.blocks[rank];
  if (!block.live_warps)
    cluster.machine->hazards.insert("the shared memory of block " + std::to_string(rank) + " of a cluster is used after the block has ended");
  return block;
}

inline uint32_t offset_of(uint32_t address) { return address & ((1u << RANK_SHIFT) - 1); }

inline uint8_t* shared(Cluster& cluster, uint32_t address, uint64_t bytes) {
  Block& block = owner(cluster, address);
  const uint32_t offset = offset_of(address);
  if (offset < 1024 || offset + bytes > block.shared.size())
    fault("touches shared memory at " + std::to_string(offset) + ", of " + std::to_string(block.shared.size()));
  return block.shared.data() + offset;
}

inline void aligned(uint64_t address, uint64_t bytes) {
  if (address % bytes) fault("address not aligned to " + std::to_string(bytes));
}

// A store by an ordinary instruction. Before the async proxy reads the bytes or writes over them, the thread that stored
// must execute fence.proxy.async, or the one that lets the async proxy do so, behind the barrier between both.
inline void note_write(Warp& warp, int lane, uint32_t address, uint64_t bytes) {
  const Writer writer{warp.block->rank * MOST_THREADS + warp.thread(lane), machine(warp).events, warp.line};
  Block& block = owner(*warp.block->cluster, address);
  const uint32_t offset = offset_of(address);
  for (uint32_t granule = offset / GRANULE; granule <= (offset + bytes - 1) / GRANULE; ++granule)
    block.writers[granule] = writer, block.repeats.erase(granule);
}

// A store of what lies there already.
inline void note_repeat(Warp& warp, int lane, uint32_t address, uint64_t bytes) {
  const Writer writer{warp.block->rank * MOST_THREADS + warp.thread(lane), machine(warp).events, warp.line};
  Block& block = owner(*warp.block->cluster, address);
  const uint32_t offset = offset_of(address);
  for (uint32_t granule = offset / GRANULE; granule <= (offset + bytes - 1) / GRANULE; ++granule)
    if (block.writers[granule].thread >= 0) block.repeats[granule].push_back(writer);
}

inline void check_proxy(Warp& warp, int lane, uint32_t address, uint64_t bytes, const char* what) {
  Cluster& cluster = *warp.block->cluster;
  Block& block = owner(cluster, address);
  const uint32_t offset = offset_of(address);
  for (uint32_t granule = offset / GRANULE; granule <= (offset + bytes - 1) / GRANULE; ++granule) {
    const Writer writer = std::exchange(block.writers[granule], {});
    if (writer.thread < 0 || warp.block->fenced[warp.thread(lane)] > writer.time) continue;
    const auto fenced = [&](const Writer& by) {
      return cluster.blocks[by.thread / MOST_THREADS].fenced[by.thread % MOST_THREADS] > by.time;
    };
    if (fenced(writer)) continue;
    const auto repeats = block.repeats.find(granule);
    if (repeats != block.repeats.end() && std::ranges::any_of(repeats->second, fenced)) continue;
    cluster.machine->hazards.insert(std::string(what) + " (line " + std::to_string(warp.line) + ") what a store wrote (line " +
                                    std::to_string(writer.line) + ") without fence.proxy.async");
  }
}

enum class Space { global, shared };

template <Space space>
bool is_shared(uint64_t address) {
  return space == Space::shared || address >= SHARED_WINDOW;
}

inline uint32_t without_window(uint64_t address) {
  return static_cast<uint32_t>(address >= SHARED_WINDOW ? address - SHARED_WINDOW : address);
}

// Until the kernel before has ended it may write what this one reads, and read what this one writes.
inline void must_have_waited(Warp& warp) {
  if (machine(warp).overlaps && !warp.waited) fault("touches an array before griddepcontrol.wait");
}

// The memory at a lane's address, checked.
template <Space space>
uint8_t* at(Warp& warp, uint64_t address, uint64_t bytes, uint64_t alignment, bool write) {
  aligned(address, alignment);
  if (!is_shared<space>(address)) {
    uint8_t* memory = machine(warp).global(address, bytes, write);
    if (machine(warp).last->name != PARAMETERS) must_have_waited(warp);
    return memory;
  }
  return shared(*warp.block->cluster, without_window(address), bytes);
}

// The same, of a load by these lanes.
template <Space space>
const uint8_t* look(Warp& warp, uint32_t lanes, uint64_t address, uint64_t bytes, uint64_t alignment) {
  const uint8_t* memory = at<space>(warp, address, bytes, alignment, false);
  if (is_shared<space>(address)) {
    const uint32_t offset = without_window(address);
    note_read(warp, access_by(warp, lanes), owner(*warp.block->cluster, offset), offset_of(offset), bytes, "a load");
  }
  return memory;
}

// A store. One of what lies there already changes nothing that the async proxy could miss; an atomic operation that leaves
// its word as it was is still ordered with others as atomic operations are. `lanes`: those that store together, if not `lane`
// alone.
template <Space space>
void put(Warp& warp, int lane, uint64_t address, const void* value, uint64_t bytes, uint64_t alignment, bool atomic = false,
         uint32_t lanes = 0) {
  uint8_t* memory = at<space>(warp, address, bytes, alignment, true);
  ++machine(warp).events;
  const bool equal = !std::memcmp(memory, value, bytes);
  std::memcpy(memory, value, bytes);
  if (!is_shared<space>(address)) return;
  const uint32_t offset = without_window(address);
  Block& block = owner(*warp.block->cluster, offset);
  if (!lanes) lanes = 1u << lane;
  if (equal && !atomic) {
    note_repeat(warp, lane, offset, bytes);
    return note_equal(warp, lanes, block, offset_of(offset), bytes);
  }
  note_write(warp, lane, offset, bytes);
  note_overwrite(warp, lanes, block, offset_of(offset), bytes, atomic);
}

inline uint64_t hash_bytes(const uint8_t* memory, size_t bytes, uint64_t seed) {
  uint64_t hash = seed * 0x9E3779B97F4A7C15ull + 1;
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ memory[i]) * 0x100000001B3ull;
  return hash;
}
