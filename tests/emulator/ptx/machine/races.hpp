// Which accesses to shared memory are ordered: vector clocks, passed on by barriers. As in PTX's memory model it is lanes
// that know, not warps: an arrival at an mbarrier hands on what the arriving lanes know, and of the other lanes of their
// warp that is only what these did before bar.warp.sync or another barrier. shfl, vote, redux and elect order nothing.
// What all lanes of a warp know is kept once. Copies into shared memory are one more agent, whose work is known by the
// copy's mbarrier. A WGMMA belongs to all lanes of its warp, and each of them waits for it.
#pragma once

#include <algorithm>

#include "state.hpp"

inline void add(Clock& clock, Part part) {
  if (clock.all[part.agent] >= part.clock) return;
  uint32_t lanes = part.lanes, least = part.clock;
  for (Part& other : clock.parts) {
    if (other.agent != part.agent) continue;
    if (other.clock <= part.clock) other.lanes &= ~part.lanes;
    if (other.clock >= part.clock) part.lanes &= ~other.lanes;
    if (other.lanes) least = std::min(least, other.clock);
    lanes |= other.lanes;
  }
  if (part.lanes) clock.parts.push_back(part);
  if (lanes == ALL_LANES) clock.all[part.agent] = least;
  std::erase_if(clock.parts, [&](const Part& other) { return !other.lanes || other.clock <= clock.all[other.agent]; });
}

inline void join(Clock& clock, const Clock& other) {
  if (clock.all.size() < other.all.size()) clock.all.resize(other.all.size());
  for (size_t agent = 0; agent < other.all.size(); ++agent) clock.all[agent] = std::max(clock.all[agent], other.all[agent]);
  if (!clock.parts.empty()) std::erase_if(clock.parts, [&](const Part& part) { return part.clock <= clock.all[part.agent]; });
  for (const Part& part : other.parts) add(clock, part);
}

// What these lanes of a warp did until now, and what they know, is handed to `to`; what they do from now on is not.
inline void release(Warp& warp, uint32_t lanes, Clock& to) {
  join(to, warp.known);
  for (const auto& [some, known] : warp.known_to_some)
    if (some & lanes) join(to, known);
  to.all[warp.products] = warp.now;
  if (!(warp.touched & ~lanes))
    to.all[warp.agent] = warp.now;
  else if (warp.touched & lanes)
    add(to, {warp.agent, warp.touched & lanes, warp.now});
  ++warp.now;
}

inline void acquire(Warp& warp, uint32_t lanes, const Clock& from) {
  if (from.all.empty()) return;
  if (lanes == warp.live) return join(warp.known, from);
  const auto same = std::ranges::find(warp.known_to_some, lanes, &std::pair<uint32_t, Clock>::first);
  if (same != warp.known_to_some.end())
    join(same->second, from);
  else
    warp.known_to_some.emplace_back(lanes, from);
}

// Each of these lanes knows what all of them know.
inline void meet_lanes(Warp& warp, uint32_t lanes) {
  Clock together;
  release(warp, lanes, together);
  acquire(warp, lanes, together);
  if (lanes != warp.live) return;
  warp.known_to_some.clear();
  warp.touched = 0;
}

// Those of the lanes that made an access of which a clock does not know it.
inline uint32_t unknown(const Clock& clock, const Access& access, uint32_t lanes) {
  if (clock.all[access.agent] >= access.clock) return 0;
  for (const Part& part : clock.parts)
    if (part.agent == access.agent && part.clock >= access.clock) lanes &= ~part.lanes;
  return lanes;
}

inline uint32_t unknown_to(const Warp& warp, uint32_t lane, const Access& access) {
  uint32_t lanes = unknown(warp.known, access, access.agent == warp.agent ? access.lanes & ~lane : access.lanes);
  for (const auto& [some, known] : warp.known_to_some)
    if (lanes && some & lane) lanes = unknown(known, access, lanes);
  return lanes;
}

// Whether `holds` for each of these lanes.
template <class Test>
bool each(uint32_t lanes, Test holds) {
  for (; lanes; lanes &= lanes - 1)
    if (!holds(lanes & -lanes)) return false;
  return true;
}

// Whether each lane of an access knows an earlier one, as far as both are of the same bytes.
inline bool knows(const Warp& warp, const Access& access, const Access& earlier) {
  if (earlier.agent < 0 || !(access.bytes & earlier.bytes) || warp.known.all[earlier.agent] >= earlier.clock) return true;
  const bool own = earlier.agent == warp.agent && (access.agent == warp.products || access.lanes == earlier.lanes);
  if (own || earlier.agent == warp.products) return true;
  return each(access.lanes, [&](uint32_t lane) { return !unknown_to(warp, lane, earlier); });
}

inline bool knows_value(const Warp& warp, const Access& access, const Word& word) {
  const auto known = [&](const Access& store) { return knows(warp, access, store); };
  if (known(word.written) && std::ranges::all_of(word.beside, known)) return true;
  return each(access.lanes, [&](uint32_t lane) {
    return std::ranges::any_of(word.equal, [&](const Access& store) {
      return !(access.bytes & ~store.bytes) && unknown_to(warp, lane, store) != store.lanes;
    });
  });
}

inline void unordered(Warp& warp, const char* what, const char* earlier, const Access& access) {
  const auto partly = [&](const Clock& known) { return unknown(known, access, ALL_LANES) != ALL_LANES; };
  const bool arrived = partly(warp.known) || std::ranges::any_of(warp.known_to_some, partly, &std::pair<uint32_t, Clock>::second);
  const char* whose = access.agent == warp.agent ? "another lane"
                      : arrived ? "another warp, by lanes that met none of those that arrived" : "another warp";
  machine(warp).hazards.insert("no barrier orders " + std::string(what) + " (line " + std::to_string(warp.line) + ") behind " +
                               earlier + " of " + whose + " (line " + std::to_string(access.line) + ")");
}

// Each word of these bytes, and the access as far as it is of that word.
template <class Visit>
void each_word(Block& block, Access access, uint32_t offset, uint64_t bytes, Visit visit) {
  const uint32_t end = offset + static_cast<uint32_t>(bytes);
  for (uint32_t word = offset / WORD; word * WORD < end; ++word) {
    const uint32_t first = std::max(offset, word * WORD) % WORD, last = std::min(end - 1, word * WORD + WORD - 1) % WORD;
    access.bytes = (2u << last) - (1u << first);
    visit(block.words[word], access);
  }
}

inline Access access_by(Warp& warp, uint32_t lanes) {
  warp.touched |= lanes;
  return {warp.agent, warp.now, warp.line, lanes};
}

// Keeps an access among those of the same kind, the latest of each lane.
inline void keep(const Warp& warp, std::vector<Access>& accesses, const Access& access) {
  Access* superseded = nullptr;
  for (Access& earlier : accesses) {
    if (earlier.agent != access.agent || earlier.bytes & ~access.bytes) continue;
    if (earlier.clock == access.clock && earlier.bytes == access.bytes) {
      earlier.lanes |= access.lanes;
      earlier.line = access.line;
      return;
    }
    if (warp.known.all[access.agent] >= earlier.clock || !(earlier.lanes & ~access.lanes)) superseded = &earlier;
  }
  if (superseded)
    *superseded = access;
  else
    accesses.push_back(access);
}

inline void note_read(Warp& warp, const Access& access, Block& block, uint32_t offset, uint64_t bytes, const char* what) {
  each_word(block, access, offset, bytes, [&](Word& word, const Access& read) {
    if (!knows_value(warp, read, word)) {
      const auto late = std::ranges::find_if(word.beside, [&](const Access& store) { return !knows(warp, read, store); });
      unordered(warp, what, word.by_copy ? "a copy" : "a store", late == word.beside.end() ? word.written : *late);
    }
    keep(warp, word.read, read);
  });
}

// `atomic`: of two atomic operations, none has to be ordered.
inline void check_overwrite(Warp& warp, const Access& access, const Word& word, const char* what, bool atomic = false) {
  const auto check = [&](const Access& earlier, const char* kind) {
    if (!knows(warp, access, earlier)) unordered(warp, what, kind, earlier);
  };
  if (!(atomic && word.atomic)) {
    check(word.written, word.by_copy ? "a copy" : "a store");
    for (const Access& store : word.beside) check(store, "a store");
    for (const Access& store : word.equal) check(store, "a store");
  }
  for (const Access& read : word.read) check(read, "a read");
}

// From now on an access is what a word's bytes were written by; others stay as they were.
inline void overwrite(Word& word, const Access& access) {
  if (word.written.agent >= 0) word.beside.push_back(word.written);
  for (auto* accesses : {&word.beside, &word.equal, &word.read}) {
    if (access.bytes == ALL_BYTES) accesses->clear();
    for (Access& earlier : *accesses) earlier.bytes &= ~access.bytes;
    std::erase_if(*accesses, [](const Access& earlier) { return !earlier.bytes; });
  }
  word.written = access;
}

inline void note_overwrite(Warp& warp, uint32_t lanes, Block& block, uint32_t offset, uint64_t bytes, bool atomic = false) {
  each_word(block, access_by(warp, lanes), offset, bytes, [&](Word& word, Access access) {
    check_overwrite(warp, access, word, atomic ? "an atomic operation" : "a store", atomic);
    const Access before = word.written;
    if (atomic && word.atomic && before.agent == access.agent && before.clock == access.clock) access.lanes |= before.lanes;
    overwrite(word, access);
    word.atomic = atomic;
    word.by_copy = false;
  });
}

// A store of what lies there already.
inline void note_equal(Warp& warp, uint32_t lanes, Block& block, uint32_t offset, uint64_t bytes) {
  each_word(block, access_by(warp, lanes), offset, bytes, [&](Word& word, const Access& access) { keep(warp, word.equal, access); });
}

// A copy into shared memory, issued by a lane. Returns what its mbarrier hands on when the copy has arrived.
inline Clock note_copy(Warp& warp, int lane, Block& block, uint32_t offset, uint64_t bytes) {
  Cluster& cluster = *warp.block->cluster;
  Clock known;
  release(warp, 1u << lane, known);
  if (!bytes) return known;
  const Access issue{warp.agent, warp.now, warp.line, 1u << lane};
  const Access access{static_cast<int>(known.all.size()) - 1, ++cluster.copy_clock, warp.line, ALL_LANES};
  each_word(block, issue, offset, bytes, [&](Word& word, const Access& part) { check_overwrite(warp, part, word, "a copy"); });
  each_word(block, access, offset, bytes, [&](Word& word, const Access& part) {
    overwrite(word, part);
    word.atomic = false;
    word.by_copy = true;
  });
  known.all[access.agent] = std::max(known.all[access.agent], access.clock);
  return known;
}
