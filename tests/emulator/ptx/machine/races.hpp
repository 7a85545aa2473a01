// Which accesses to shared memory are ordered: a vector clock a warp, passed on by barriers. Lanes of a warp count as one,
// and copies into shared memory as one more agent, whose work a warp knows of by the copy's mbarrier.
#pragma once

#include <algorithm>

#include "state.hpp"

inline void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t agent = 0; agent < other.size(); ++agent) clock[agent] = std::max(clock[agent], other[agent]);
}

// What a warp did until now is handed to `to`; what it does from now on is not.
inline void release(Warp& warp, Clock& to) {
  join(to, warp.clock);
  ++warp.clock[warp.agent];
}

inline void acquire(Warp& warp, const Clock& from) { join(warp.clock, from); }

inline void unordered(Warp& warp, const char* what, const char* earlier, int32_t line) {
  machine(warp).hazards.insert("no barrier orders " + std::string(what) + " (line " + std::to_string(warp.line) + ") behind " +
                               earlier + " of another warp (line " + std::to_string(line) + ")");
}

inline bool knows(const Warp& warp, const Access& access) {
  return access.agent < 0 || access.agent == warp.agent || access.clock <= warp.clock[access.agent];
}

inline bool knows_value(const Warp& warp, const Word& word) {
  return knows(warp, word.written) || std::ranges::any_of(word.equal, [&](const Access& store) { return knows(warp, store); });
}

template <class Visit>
void each_word(Block& block, uint32_t offset, uint64_t bytes, Visit visit) {
  for (uint32_t word = offset / WORD; word <= (offset + bytes - 1) / WORD; ++word) visit(block.words[word]);
}

inline void note_read(Warp& warp, Block& block, uint32_t offset, uint64_t bytes, const char* what = "a load") {
  each_word(block, offset, bytes, [&](Word& word) {
    if (!knows_value(warp, word)) unordered(warp, what, word.by_copy ? "a copy" : "a store", word.written.line);
    const auto mine = std::ranges::find(word.read, warp.agent, &Access::agent);
    const Access access{warp.agent, warp.clock[warp.agent], warp.line};
    if (mine == word.read.end())
      word.read.push_back(access);
    else
      *mine = access;
  });
}

// `atomic`: of two atomic operations, none has to be ordered.
inline void check_overwrite(Warp& warp, Block& block, uint32_t offset, uint64_t bytes, const char* what, bool atomic = false) {
  each_word(block, offset, bytes, [&](const Word& word) {
    if (!(atomic && word.atomic) && !knows(warp, word.written))
      unordered(warp, what, word.by_copy ? "a copy" : "a store", word.written.line);
    for (const Access& store : word.equal)
      if (!(atomic && word.atomic) && !knows(warp, store)) unordered(warp, what, "a store", store.line);
    for (const Access& read : word.read)
      if (!knows(warp, read)) unordered(warp, what, "a read", read.line);
  });
}

inline void note_overwrite(Warp& warp, Block& block, uint32_t offset, uint64_t bytes, bool atomic = false) {
  check_overwrite(warp, block, offset, bytes, atomic ? "an atomic operation" : "a store", atomic);
  each_word(block, offset, bytes, [&](Word& word) {
    word = {{warp.agent, warp.clock[warp.agent], warp.line}, {}, {}, atomic, false};
  });
}

// A store of what lies there already.
inline void note_equal(Warp& warp, Block& block, uint32_t offset, uint64_t bytes) {
  each_word(block, offset, bytes, [&](Word& word) {
    const auto mine = std::ranges::find(word.equal, warp.agent, &Access::agent);
    const Access access{warp.agent, warp.clock[warp.agent], warp.line};
    if (mine == word.equal.end())
      word.equal.push_back(access);
    else
      *mine = access;
  });
}

// A copy into shared memory, issued by this warp. Returns what its mbarrier hands on when the copy has arrived.
inline Clock note_copy(Warp& warp, Block& block, uint32_t offset, uint64_t bytes) {
  Cluster& cluster = *warp.block->cluster;
  const int agent = static_cast<int>(warp.clock.size()) - 1;
  const Access access{agent, ++cluster.copy_clock, warp.line};
  check_overwrite(warp, block, offset, bytes, "a copy");
  each_word(block, offset, bytes, [&](Word& word) { word = {access, {}, {}, false, true}; });
  Clock known = warp.clock;
  known[agent] = std::max(known[agent], access.clock);
  return known;
}
