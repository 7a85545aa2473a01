// mbarriers, in eight bytes of shared memory, and the barriers of blocks and clusters.
#pragma once

#include "memory.hpp"

// Phase (1 bit), arrivals pending and expected (20 bits each), bytes expected and not there yet (23 bits, signed).
struct MBarrier {
  uint64_t phase : 1, pending : 20, expected : 20;
  int64_t bytes : 23;
};
static_assert(sizeof(MBarrier) == 8);

inline MBarrier* barrier_at(Cluster& cluster, uint32_t address) {
  aligned(address, 8);
  Block& block = owner(cluster, address);
  if (!block.barriers.count(offset_of(address))) fault("uses an mbarrier that was not initialised");
  return reinterpret_cast<MBarrier*>(shared(cluster, address, 8));
}

inline void settle(MBarrier* barrier) {
  if (barrier->pending || barrier->bytes) return;
  barrier->phase ^= 1;
  barrier->pending = barrier->expected;
}

inline void initialise(Cluster& cluster, uint32_t address, uint64_t count) {
  if (!count || count >= 1 << 20) fault("an mbarrier for " + std::to_string(count) + " arrivals");
  owner(cluster, address).barriers[offset_of(address)] = {};
  *barrier_at(cluster, address) = {0, count, count, 0};
}

inline Clock& handed_on(Cluster& cluster, uint32_t address) {
  return owner(cluster, address).barriers.at(offset_of(address));
}

// One of the arrivals that `lanes` of a warp make at this barrier at once.
inline void arrive(Warp& warp, uint32_t lanes, uint32_t address, uint64_t count) {
  Cluster& cluster = *warp.block->cluster;
  ++cluster.machine->events;
  MBarrier* barrier = barrier_at(cluster, address);
  release(warp, lanes, handed_on(cluster, address));
  if (barrier->pending < count) fault("more arrivals at an mbarrier than it expects in a phase");
  barrier->pending -= count;
  settle(barrier);
}

inline void expect(Cluster& cluster, uint32_t address, int64_t bytes) { barrier_at(cluster, address)->bytes += bytes; }

inline void complete(Cluster& cluster, uint32_t address, int64_t bytes) {
  MBarrier* barrier = barrier_at(cluster, address);
  ++cluster.machine->events;
  barrier->bytes -= bytes;
  settle(barrier);
}

inline bool passed(Cluster& cluster, uint32_t address, uint32_t parity) {
  return barrier_at(cluster, address)->phase != (parity & 1);
}

struct Meeting {
  uint32_t number;
  int threads;  // that meet; negative: all of the block
  bool wait;
  int32_t result;  // the slot for whether `any` holds in some lane, or -1
  bool any;
};

inline void meet(Warp& warp, const Meeting& meeting) {
  if (meeting.number >= 16) fault("barrier " + std::to_string(meeting.number) + " of 16");
  NamedBarrier& barrier = warp.block->named[meeting.number];
  const int threads = meeting.threads < 0 ? warp.block->live_warps * LANES : meeting.threads;
  if (threads % LANES || !threads) fault("a barrier for " + std::to_string(threads) + " threads");
  if (barrier.arrived && barrier.expected != threads) fault("a barrier whose warps disagree how many arrive");
  ++machine(warp).events;
  barrier.expected = threads;
  release(warp, warp.live, barrier.clock);
  barrier.arrived += LANES;
  barrier.any = barrier.any || meeting.any;
  if (meeting.result >= 0) barrier.results.emplace_back(&warp, meeting.result);
  if (meeting.wait) {
    barrier.waiting.push_back(&warp);
    warp.stopped = true;
  }
  if (barrier.arrived < threads) return;
  for (auto& [waiting, slot] : barrier.results)
    for (int lane = 0; lane < LANES; ++lane) waiting->slot(slot)[lane] = barrier.any;
  for (Warp* waiting : barrier.waiting) {
    meet_lanes(*waiting, waiting->live);
    acquire(*waiting, waiting->live, barrier.clock);
    waiting->stopped = false;
  }
  barrier = {};
}

inline void release_cluster(Cluster& cluster) {
  ++cluster.machine->events;
  if (cluster.arrivals.size() < static_cast<size_t>(cluster.live_warps)) return;
  join(cluster.known, cluster.arriving);
  for (const auto& [warp, waits] : std::exchange(cluster.arrivals, {}))
    if (waits) {
      acquire(*warp, warp->live, cluster.known);
      warp->stopped = false;
    }
}

// A relaxed arrival hands nothing on of what the warp did.
inline void arrive_at_cluster(Warp& warp, bool relaxed) {
  Cluster& cluster = *warp.block->cluster;
  if (std::exchange(warp.arrived, true)) fault("arrives again at the barrier of the cluster before it has waited there");
  cluster.arrivals.push_back({&warp, false});
  if (!relaxed) release(warp, warp.live, cluster.arriving);
  release_cluster(cluster);
}

inline void wait_for_cluster(Warp& warp) {
  Cluster& cluster = *warp.block->cluster;
  if (!std::exchange(warp.arrived, false)) fault("waits at the barrier of the cluster and has not arrived there");
  const auto own = std::ranges::find(cluster.arrivals, &warp, &Arrival::warp);
  if (own == cluster.arrivals.end()) return acquire(warp, warp.live, cluster.known);
  own->waits = warp.stopped = true;
}

// Barriers of all threads and of the cluster do not wait for a warp that has ended.
inline void end_warp(Warp& warp) {
  Block& block = *warp.block;
  Cluster& cluster = *block.cluster;
  --block.live_warps;
  --cluster.live_warps;
  std::erase_if(cluster.arrivals, [&](const Arrival& arrival) { return arrival.warp == &warp; });
  if (cluster.live_warps) release_cluster(cluster);
}
