// What a running grid consists of: clusters of blocks of warps, their registers, memory and barriers.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

constexpr int LANES = 32;
constexpr uint32_t ALL_LANES = 0xffffffffu;
constexpr uint64_t SHARED_WINDOW = 1ull << 60;  // generic addresses of shared memory begin here
constexpr int RANK_SHIFT = 24;                  // a shared address: the block's rank in its cluster, then the offset
constexpr int MOST_THREADS = 1024;              // of a block
constexpr int WORD = 4;                         // bytes of shared memory whose accesses are known
constexpr uint32_t ALL_BYTES = 15;              // of a word
constexpr int GRANULE = 16;                     // bytes of shared memory for which the last writer is known

const std::string PARAMETERS = "parameters";  // of the kernel: a region as arrays are

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Warp;
struct Block;
struct Cluster;
struct Machine;
struct Instruction;

// What follows an instruction: the next one; a pause, for the warp waits in a loop; or a stop until others release it.
enum class Flow { next, pause, stop };
using Handler = Flow (*)(Warp&, const Instruction&, uint32_t mask);
enum class Kind { plain, branch, exit, converge };

struct Instruction {
  Handler run;
  Kind kind;
  int32_t guard;  // the slot of a predicate, or -1
  int32_t negated;
  int32_t line;
  int32_t members;  // for Kind::converge: the slot of the mask of lanes that must come together, or -1 for all
  int32_t aux;      // the number of a vector's elements, or what else belongs to the opcode
  int32_t count;
  const int32_t* slots;
  const char* name;
};

struct Program {
  std::string name;
  std::vector<Instruction> code;
  std::vector<int32_t> slots;
  std::vector<std::string> names;
  int32_t registers = 0;
  std::vector<uint64_t> constants;
  std::vector<int32_t> constant_kinds;  // 0: a number; 1: an offset in the parameters; 2: one in shared memory; from 16: special
  std::vector<int32_t> parameters;      // offset and size of each
  int32_t parameter_bytes = 0;
  int32_t threads = 0;
};

struct Region {
  uint64_t base, size;
  bool writable;
  std::string name;
};

// What some lanes of a warp did until a moment.
struct Part {
  int agent;
  uint32_t lanes, clock;
};

// What is known: of each agent the latest moment until which all is, and parts of what came behind that moment. Agents are
// the warps of a cluster, the products of each of them, and the copies.
struct Clock {
  std::vector<uint32_t> all;
  std::vector<Part> parts;
};

// An access is known where each of its lanes is known to have made it.
struct Access {
  int agent = -1;
  uint32_t clock = 0;
  int32_t line = 0;
  uint32_t lanes = ALL_LANES;
  uint32_t bytes = ALL_BYTES;  // of the word, a bit each
};

struct Word {
  Access written;
  std::vector<Access> beside;  // the latest stores to other bytes of the word than `written`
  std::vector<Access> equal;   // stores of the same value since: a lane that made one knows the value
  std::vector<Access> read;    // since it was written, the latest of each lane
  bool atomic = false, by_copy = false;
};

struct NamedBarrier {
  Clock clock;
  int arrived = 0, expected = 0;
  bool any = false;  // of the predicates that barrier.red was given
  std::vector<Warp*> waiting;
  std::vector<std::pair<Warp*, int32_t>> results;  // the slots that barrier.red writes
};

// A copy that the async proxy makes at some later time.
struct Copy {
  std::function<void()> run;
};

struct Product;  // a WGMMA whose operands in shared memory must stay as they are (wgmma.hpp)

struct BulkGroup {
  std::vector<std::function<void()>> checks;  // that what is read has not changed until it is waited for
};

struct Warp {
  Block* block = nullptr;
  int index = 0;  // in the block
  uint32_t live = 0;
  uint32_t spinning = 0;
  bool stopped = false;
  bool waited = false;                 // for the kernels before: griddepcontrol.wait
  bool arrived = false;                // at the barrier of the cluster, and has not waited there since
  int32_t line = 0;                    // of the instruction that runs
  const Instruction* waits = nullptr;  // at which the warp stopped last
  int32_t pc[LANES] = {};
  std::vector<uint64_t> registers;  // [slot][lane]; constants behind the registers
  std::vector<Product> open_products;
  std::vector<std::vector<Product>> product_groups;
  std::vector<BulkGroup> bulk_groups[LANES];
  BulkGroup open_bulk[LANES];
  std::vector<std::function<void()>> open_copies[LANES];  // cp.async of no group yet
  std::vector<std::vector<std::function<void()>>> copy_groups[LANES];  // those that were not waited for

  int agent = 0, products = 0;  // of what its lanes access, and of what its WGMMAs do, which are no lane's
  uint32_t now = 1;             // its own moment
  uint32_t touched = 0;         // lanes that accessed shared memory since all lanes met
  Clock known;                  // to all lanes
  std::vector<std::pair<uint32_t, Clock>> known_to_some;  // lanes, and what they know besides

  uint64_t* slot(int32_t number) { return registers.data() + static_cast<size_t>(number) * LANES; }
  int thread(int lane) const { return index * LANES + lane; }
  Warp();
  Warp(Warp&&) noexcept;
  ~Warp();
};

// Who stored to a granule of shared memory last; no thread if the async proxy did, or knows of it.
struct Writer {
  int32_t thread = -1;  // in the cluster
  uint64_t time = 0;    // by Machine::events
  int32_t line = 0;
};

struct Block {
  Cluster* cluster = nullptr;
  uint32_t id[3] = {};
  int rank = 0;  // in the cluster
  std::vector<uint8_t> shared;
  std::vector<Writer> writers;  // of each granule
  std::map<uint32_t, std::vector<Writer>> repeats;  // who stored the same to a granule again, whose fences count, too
  std::vector<uint64_t> fenced;  // when each thread made its latest fence.proxy.async
  std::vector<Word> words;
  std::map<uint32_t, Clock> barriers;  // what initialised mbarriers hand on, by offset
  NamedBarrier named[16];
  std::vector<Warp> warps;
  int live_warps = 0;
};

// A warp that has arrived in the present phase of its cluster's barrier. It may stop elsewhere before it waits there.
struct Arrival {
  Warp* warp;
  bool waits;
};

struct Cluster {
  Machine* machine = nullptr;
  const Program* program = nullptr;
  uint32_t grid[3] = {}, size[3] = {1, 1, 1}, id[3] = {};
  std::vector<Block> blocks;
  std::vector<Copy> copies;
  int live_warps = 0;
  std::vector<Arrival> arrivals;  // of live warps
  Clock arriving, known;          // of those that have arrived, and of the latest phase that has ended
  uint32_t copy_clock = 0;
};

struct Machine {
  std::vector<Region> regions;
  std::mt19937_64 random;
  std::set<std::string> hazards;
  uint64_t budget = 0;  // of instructions of warps that are left
  uint64_t events = 0;  // that another warp could wait for: the machine's time
  const Region* last = nullptr;
  int launches = 0;        // of the call
  bool overlaps = false;   // the grid begins while the kernel before the call may still run

  uint8_t* global(uint64_t address, uint64_t bytes, bool write) {
    if (!last || address < last->base || address + bytes > last->base + last->size || (write && !last->writable))
      last = find(address, bytes, write);
    return reinterpret_cast<uint8_t*>(address);
  }
  const Region* find(uint64_t address, uint64_t bytes, bool write) const;
};

inline Machine& machine(Warp& warp) { return *warp.block->cluster->machine; }
[[noreturn]] void fault(const std::string& text);
