// The machine: it takes programs and memory from Python, stands in for the CUDA runtime under a compiled object's host
// function, and runs each grid that this launches.
//
// The order of warps and of the async proxy's copies is random, from a seed, so that code which relies on an order fails
// in some runs. Lanes that diverged run apart, those furthest behind first, and meet where an instruction needs them.
#include "exchange.hpp"

namespace {

const Handlers& handlers() {
  static const Handlers all = [] {
    Handlers made;
    add_arithmetic(made);
    add_exchange(made);
    return made;
  }();
  return all;
}

struct Specials {
  // The order of SPECIAL in encode.py.
  static uint64_t value(const Warp& warp, int kind, int lane) {
    const Block& block = *warp.block;
    const Cluster& cluster = *block.cluster;
    const int thread = warp.thread(lane);
    switch (kind) {
      case 0: return thread;
      case 1: case 2: return 0;  // %tid.y, z: blocks are lines of threads
      case 3: return cluster.program->threads;
      case 4: case 5: return 1;
      case 6: case 7: case 8: return block.id[kind - 6];
      case 9: case 10: case 11: return cluster.grid[kind - 9];
      case 12: return lane;
      case 13: return warp.index;
      case 14: return block.rank;
      case 15: return cluster.blocks.size();
      case 16: case 17: case 18: return block.id[kind - 16] % cluster.size[kind - 16];
      case 19: case 20: case 21: return cluster.size[kind - 19];
      case 22: case 23: case 24: return cluster.id[kind - 22];
      case 25: case 26: case 27: return cluster.grid[kind - 25] / cluster.size[kind - 25];
      case 28: return block.shared.size() - 1024;  // %dynamic_smem_size
      case 29: return 0;  // %clock and the like
      default: fault("an unknown special register");
    }
  }
};

// Tensor maps among the parameters are aligned to 64 bytes.
struct alignas(64) Chunk {
  uint8_t bytes[64];
};
using Parameters = std::vector<Chunk>;

class Grid {
 public:
  Grid(Machine& machine, const Program& program, Parameters parameters)
      : machine_(machine), program_(program), parameters_(std::move(parameters)) {}

  // All clusters of the grid, or only those of `part` if it has any.
  void run(const uint32_t* grid, const uint32_t* size, uint64_t shared_bytes, int resident, const std::vector<uint64_t>& part) {
    const uint64_t blocks = static_cast<uint64_t>(size[0]) * size[1] * size[2];
    for (int axis = 0; axis < 3; ++axis)
      if (!grid[axis] || grid[axis] % size[axis]) fault("a grid that clusters don't fill");
    machine_.regions.push_back({reinterpret_cast<uint64_t>(parameters_.data()), parameters_.size() * sizeof(Chunk), false, PARAMETERS});
    machine_.last = nullptr;
    const uint64_t all = static_cast<uint64_t>(grid[0]) * grid[1] * grid[2] / blocks, clusters = part.empty() ? all : part.size();
    for (const uint64_t number : part)
      if (number >= all) fault("the grid has " + std::to_string(all) + " clusters");
    std::vector<std::unique_ptr<Cluster>> running;
    uint64_t next = 0;
    int idle = 0;
    while (next < clusters || !running.empty()) {
      while (next < clusters && running.size() < static_cast<size_t>(resident)) {
        running.push_back(start(part.empty() ? next : part[next], grid, size, shared_bytes));
        ++next;
      }
      const uint64_t before = machine_.events;
      for (auto& cluster : running) round(*cluster);
      std::erase_if(running, [](const auto& cluster) { return !cluster->live_warps && cluster->copies.empty(); });
      idle = machine_.events == before ? idle + 1 : 0;
      if (idle > 64) fault("nothing moves any more: " + where(running));
    }
    machine_.regions.pop_back();
    machine_.last = nullptr;
  }

 private:
  std::unique_ptr<Cluster> start(uint64_t number, const uint32_t* grid, const uint32_t* size, uint64_t shared_bytes) {
    auto cluster = std::make_unique<Cluster>();
    cluster->machine = &machine_;
    cluster->program = &program_;
    for (int axis = 0; axis < 3; ++axis) {
      cluster->grid[axis] = grid[axis];
      cluster->size[axis] = size[axis];
      cluster->id[axis] = static_cast<uint32_t>(number % (grid[axis] / size[axis]));
      number /= grid[axis] / size[axis];
    }
    const uint32_t count = size[0] * size[1] * size[2];
    const int warps = (program_.threads + LANES - 1) / LANES;
    cluster->blocks.resize(count);
    for (uint32_t rank = 0; rank < count; ++rank) {
      Block& block = cluster->blocks[rank];
      block.cluster = cluster.get();
      block.rank = static_cast<int>(rank);
      uint32_t rest = rank;
      for (int axis = 0; axis < 3; ++axis) {
        block.id[axis] = cluster->id[axis] * size[axis] + rest % size[axis];
        rest /= size[axis];
      }
      block.shared.assign(1024 + shared_bytes, 0xff);  // NaN in every format
      block.words.resize(block.shared.size() / WORD + 1);
      block.writers.resize(block.shared.size() / GRANULE + 1);
      block.fenced.assign(warps * LANES, 0);
      block.warps.resize(warps);
      block.live_warps = warps;
      for (int index = 0; index < warps; ++index) prepare(block, index);
    }
    cluster->live_warps = static_cast<int>(count) * warps;
    return cluster;
  }

  void prepare(Block& block, int index) {
    Warp& warp = block.warps[index];
    warp.block = &block;
    warp.index = index;
    const int threads = std::min(LANES, program_.threads - index * LANES);
    warp.agent = block.rank * static_cast<int>(block.warps.size()) + index;
    const size_t warps = block.cluster->blocks.size() * block.warps.size();
    warp.products = static_cast<int>(warps) + warp.agent;
    warp.known.all.assign(2 * warps + 1, 0);
    warp.live = threads == LANES ? ALL_LANES : (1u << threads) - 1;
    warp.registers.assign((program_.registers + program_.constants.size()) * LANES, 0xbad0bad0bad0bad0ull);
    for (size_t number = 0; number < program_.constants.size(); ++number)
      for (int lane = 0; lane < LANES; ++lane) {
        const int kind = program_.constant_kinds[number];
        uint64_t value = program_.constants[number];
        if (kind == 1) value += reinterpret_cast<uint64_t>(parameters_.data());
        if (kind == 2) value += static_cast<uint64_t>(block.rank) << RANK_SHIFT;
        if (kind >= 16) value = Specials::value(warp, kind - 16, lane);
        warp.slot(program_.registers + static_cast<int32_t>(number))[lane] = value;
      }
  }

  // Every warp for a while, in a random order, then some of the copies.
  void round(Cluster& cluster) {
    std::vector<Warp*> order;
    for (Block& block : cluster.blocks)
      for (Warp& warp : block.warps)
        if (warp.live) order.push_back(&warp);
    std::shuffle(order.begin(), order.end(), machine_.random);
    for (Warp* warp : order)
      if (!warp->stopped) step(*warp, static_cast<int>(1 + machine_.random() % 4096));
    std::shuffle(cluster.copies.begin(), cluster.copies.end(), machine_.random);
    for (size_t count = cluster.copies.empty() ? 0 : 1 + machine_.random() % cluster.copies.size(); count; --count) {
      ++machine_.events;
      cluster.copies.back().run();
      cluster.copies.pop_back();
    }
  }

  void step(Warp& warp, int budget) {
    warp.spinning = 0;
    while (budget > 0 && warp.live && !warp.stopped) {
      const auto [mask, limit] = choose(warp);
      if (!mask) return;
      if (mask & warp.spinning) return;  // only those that wait are left
      run(warp, mask, limit, budget);
    }
  }

  // The lanes to run: of those that can, and do not spin, the ones furthest behind; and where the next ones wait.
  std::pair<uint32_t, int32_t> choose(const Warp& warp) const {
    uint32_t best = 0;
    for (const uint32_t among : {warp.live & ~warp.spinning, warp.live & warp.spinning}) {
      uint32_t left = among;
      while (left && !best) {
        int32_t least = INT32_MAX;
        for (int lane = 0; lane < LANES; ++lane)
          if (left >> lane & 1) least = std::min(least, warp.pc[lane]);
        uint32_t group = 0;
        for (int lane = 0; lane < LANES; ++lane)
          if (warp.live >> lane & 1 && warp.pc[lane] == least) group |= 1u << lane;
        if (together(warp, program_.code[least], group)) best = group;
        left &= ~group;
      }
      if (best) break;
    }
    int32_t limit = INT32_MAX;
    if (best) {
      const int32_t here = warp.pc[std::countr_zero(best)];
      for (int lane = 0; lane < LANES; ++lane)
        if (warp.live >> lane & 1 && warp.pc[lane] > here) limit = std::min(limit, warp.pc[lane]);
    }
    return {best, limit};
  }

  static bool together(const Warp& warp, const Instruction& i, uint32_t group) {
    if (i.kind != Kind::converge) return true;
    uint32_t members = ALL_LANES;
    if (i.members >= 0)
      members = static_cast<uint32_t>(const_cast<Warp&>(warp).slot(i.members)[std::countr_zero(group)]);
    return !(members & warp.live & ~group);
  }

  static void place(Warp& warp, uint32_t mask, int32_t pc) {
    for (int lane = 0; lane < LANES; ++lane)
      if (mask >> lane & 1) warp.pc[lane] = pc;
  }

  void run(Warp& warp, uint32_t mask, int32_t limit, int& budget) {
    int32_t pc = warp.pc[std::countr_zero(mask)];
    const Instruction* i = nullptr;
    try {
      for (;;) {
        i = &program_.code[pc];
        uint32_t active = mask;
        if (i->guard >= 0)
          for (int lane = 0; lane < LANES; ++lane)
            if ((warp.slot(i->guard)[lane] & 1) == static_cast<uint64_t>(i->negated)) active &= ~(1u << lane);
        if (i->kind == Kind::branch) {
          if (active && active != mask) {
            place(warp, active, i->slots[0]);
            place(warp, mask & ~active, pc + 1);
            return;
          }
          pc = active ? i->slots[0] : pc + 1;
        } else if (i->kind == Kind::exit) {
          warp.live &= ~active;
          mask &= ~active;
          if (active) ++machine_.events;
          if (!warp.live) end_warp(warp);
          if (!mask) return;
          ++pc;
        } else {
          if (!together(warp, *i, mask)) return place(warp, mask, pc);
          warp.line = i->line;
          const Flow flow = active ? i->run(warp, *i, active) : Flow::next;
          ++pc;
          if (flow == Flow::pause) warp.spinning |= mask;
          if (flow != Flow::next) warp.waits = i;
          if (flow != Flow::next) return place(warp, mask, pc);
        }
        if (!machine_.budget--) fault("runs on and on");
        if (pc >= limit || --budget <= 0) return place(warp, mask, pc);
      }
    } catch (const Fault& error) {
      char text[160];
      std::snprintf(text, sizeof text, " (%s, line %d of the PTX, block %u,%u,%u, warp %d)", i ? i->name : "", i ? i->line : 0,
                    warp.block->id[0], warp.block->id[1], warp.block->id[2], warp.index);
      throw Fault(error.what() + std::string(text));
    }
  }

  std::string where(const std::vector<std::unique_ptr<Cluster>>& running) const {
    std::set<std::string> places;
    for (const auto& cluster : running)
      for (const Block& block : cluster->blocks)
        for (const Warp& warp : block.warps)
          for (int lane = 0; lane < LANES; ++lane)
            if (warp.live >> lane & 1) {
              const bool waits = warp.stopped || warp.spinning >> lane & 1;
              const Instruction& i = waits && warp.waits ? *warp.waits : program_.code[warp.pc[lane]];
              places.insert("warp " + std::to_string(warp.index) + " at " + i.name + ", line " + std::to_string(i.line));
            }
    std::string text;
    for (const auto& place : places) text += (text.empty() ? "" : "; ") + place;
    return text;
  }

  Machine& machine_;
  const Program& program_;
  Parameters parameters_;
};

struct World {
  Machine machine;
  std::vector<std::unique_ptr<Program>> programs;
  std::string error;
  int resident = 1;
  std::string part_kernel;  // if it isn't empty: only clusters `part` of the kernels whose names contain it run
  std::vector<uint64_t> part;
} world;

// cudaLaunchConfig_t and cudaLaunchAttribute, as far as they matter here.
struct LaunchAttribute {
  int32_t id, padding;
  uint32_t value[16];
};
struct LaunchConfig {
  uint32_t grid[3], block[3];
  uint64_t shared_bytes;
  void* stream;
  const LaunchAttribute* attributes;
  uint32_t count;
};
constexpr int CLUSTER_DIMENSION = 4, PROGRAMMATIC_SERIALIZATION = 6;

}  // namespace

extern "C" {

struct Encoded {
  const char* name;
  const int32_t* words;  // of each instruction: handler, kind, guard, negated, line, members, aux, count, the slots
  int64_t word_count;
  const char* const* handler_names;
  const char* const* opcodes;  // of each instruction
  const uint64_t* constants;
  const int32_t* constant_kinds;
  int32_t constant_count, registers, threads;
  const int32_t* parameters;
  int32_t parameter_count, parameter_bytes;
};

void machine_reset(uint64_t seed, uint64_t budget, int resident) {
  world.machine = Machine();
  world.machine.random.seed(seed);
  world.machine.budget = budget;
  world.programs.clear();
  world.error.clear();
  world.resident = resident;
  world.part_kernel.clear();
  world.part.clear();
}

void machine_part(const char* kernel, const uint64_t* clusters, int count) {
  world.part_kernel = kernel;
  world.part.assign(clusters, clusters + count);
}

int machine_program(const Encoded* encoded) {
  auto program = std::make_unique<Program>();
  program->name = encoded->name;
  program->registers = encoded->registers;
  program->threads = encoded->threads;
  program->constants.assign(encoded->constants, encoded->constants + encoded->constant_count);
  program->constant_kinds.assign(encoded->constant_kinds, encoded->constant_kinds + encoded->constant_count);
  program->parameters.assign(encoded->parameters, encoded->parameters + 2 * encoded->parameter_count);
  program->parameter_bytes = encoded->parameter_bytes;
  program->slots.assign(encoded->words, encoded->words + encoded->word_count);
  for (int64_t word = 0; word < encoded->word_count;) {
    const int32_t* w = program->slots.data() + word;
    Instruction i{nullptr, static_cast<Kind>(w[1]), w[2], w[3], w[4], w[5], w[6], w[7], w + 8, nullptr};
    if (i.kind == Kind::plain || i.kind == Kind::converge) {
      const auto found = handlers().find(encoded->handler_names[w[0]]);
      if (found == handlers().end()) {
        world.error = std::string("unknown instruction ") + encoded->handler_names[w[0]] + " (" + encoded->opcodes[program->code.size()] + ")";
        return 1;
      }
      i.run = found->second;
    }
    program->names.emplace_back(encoded->opcodes[program->code.size()]);
    program->code.push_back(i);
    word += 8 + w[7];
  }
  for (size_t number = 0; number < program->code.size(); ++number) program->code[number].name = program->names[number].c_str();
  world.programs.push_back(std::move(program));
  return 0;
}

void machine_region(const char* name, uint64_t base, uint64_t size, int writable) {
  world.machine.regions.push_back({base, size, writable != 0, name});
}

const char* machine_error() { return world.error.c_str(); }

const char* machine_hazards() {
  static std::string text;
  text.clear();
  for (const auto& hazard : world.machine.hazards) text += hazard + "\n";
  return text.c_str();
}

// The functions of the CUDA runtime that a compiled object calls.
int _cudaLibraryLoadData(void** library, ...) { return *library = &world, 0; }

int _cudaLibraryGetKernel(void** kernel, void*, const char* name) {
  for (auto& program : world.programs)
    if (program->name == name) return *kernel = program.get(), 0;
  world.error = std::string("no program for ") + name;
  return 1;
}

int _cudaGetDevice(int* device) { return *device = 0, 0; }
int _cudaDeviceGetAttribute(int* value, int, int) { return *value = 132, 0; }
int _cudaFuncSetAttribute(void*, int, int) { return 0; }
int _cudaKernelSetAttributeForDevice(void*, int, int, int) { return 0; }
int _cuKernelGetAttribute(int* value, int, void*, int) { return *value = 0, 0; }

int _cudaLaunchKernelEx(const LaunchConfig* config, void* kernel, void** arguments) {
  const auto& program = *static_cast<Program*>(kernel);
  if (program.name.find(world.part_kernel) == std::string::npos) return 0;
  try {
    Parameters parameters(program.parameter_bytes / sizeof(Chunk) + 1);
    auto* memory = reinterpret_cast<uint8_t*>(parameters.data());
    for (size_t i = 0; i < program.parameters.size() / 2; ++i)
      std::memcpy(memory + program.parameters[2 * i], arguments[i], program.parameters[2 * i + 1]);
    uint32_t size[3] = {1, 1, 1};
    bool programmatic = false;
    for (uint32_t i = 0; i < config->count; ++i) {
      if (config->attributes[i].id == CLUSTER_DIMENSION) std::copy_n(config->attributes[i].value, 3, size);
      if (config->attributes[i].id == PROGRAMMATIC_SERIALIZATION) programmatic = config->attributes[i].value[0];
    }
    const bool first = world.machine.launches++ == 0;  // a later one begins behind it, and so behind the call before
    world.machine.overlaps = programmatic && first;
    const uint32_t threads = config->block[0] * config->block[1] * config->block[2];
    if (static_cast<int32_t>(threads) != program.threads) fault("a launch with another number of threads than the kernel has");
    Grid(world.machine, program, std::move(parameters)).run(config->grid, size, config->shared_bytes, world.resident, world.part);
  } catch (const Fault& error) {
    world.error = program.name.substr(0, 60) + ": " + error.what();
    return 1;
  }
  return 0;
}
}
