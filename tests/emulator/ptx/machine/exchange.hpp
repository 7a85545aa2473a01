// Instructions that reach beyond a lane: loads and stores, atomics, exchanges in a warp, barriers, copies, products.
#pragma once

#include "arithmetic.hpp"
#include "copies.hpp"
#include "wgmma.hpp"

inline uint64_t address_of(Warp& warp, const Instruction& i, int first, int lane) {
  return warp.slot(i.slots[first])[lane] + warp.slot(i.slots[first + 1])[lane];
}

inline uint32_t shared_address(Warp& warp, const Instruction& i, int first, int lane) {
  const uint64_t address = address_of(warp, i, first, lane);
  return without_window(address);
}

// aux: the elements of a vector. Slots: the registers, then base and offset.
template <class T, Space space>
Flow load(Warp& warp, const Instruction& i, uint32_t mask) {
  EACH_LANE {
    const uint64_t bytes = sizeof(T) * i.aux;
    const uint8_t* memory = look<space>(warp, 1u << lane, address_of(warp, i, i.aux, lane), bytes, bytes);
    for (int part = 0; part < i.aux; ++part) {
      T value;
      std::memcpy(&value, memory + part * sizeof(T), sizeof(T));
      write<T>(warp, i.slots[part], lane, value);
    }
  }
  return Flow::next;
}

constexpr int MOST_ELEMENTS = 8;  // of a vector

// Slots: base and offset, then the registers.
template <class T, Space space>
Flow store(Warp& warp, const Instruction& i, uint32_t mask) {
  EACH_LANE {
    T values[MOST_ELEMENTS];
    for (int part = 0; part < i.aux; ++part) values[part] = read<T>(warp, i.slots[2 + part], lane);
    const uint64_t bytes = sizeof(T) * i.aux;
    put<space>(warp, lane, address_of(warp, i, 0, lane), values, bytes, bytes);
  }
  return Flow::next;
}

template <class T, class F, Space space>
Flow atomic(Warp& warp, const Instruction& i, uint32_t mask) {  // aux: 1 if the old value is wanted
  EACH_LANE {
    const uint64_t address = address_of(warp, i, i.aux, lane);
    T before;
    std::memcpy(&before, at<space>(warp, address, sizeof(T), sizeof(T), true), sizeof(T));
    const T after = F()(before, read<T>(warp, i.slots[i.aux + 2], lane));
    put<space>(warp, lane, address, &after, sizeof(T), sizeof(T), true);
    if (i.aux) write<T>(warp, i.slots[0], lane, before);
  }
  return Flow::next;
}

// A reduction of a vector, whose elements are each added atomically. aux: how many. Slots: base and offset, then the registers.
template <class T, class F, Space space>
Flow reduce_vector(Warp& warp, const Instruction& i, uint32_t mask) {
  EACH_LANE {
    const uint64_t address = address_of(warp, i, 0, lane), bytes = sizeof(T) * i.aux;
    T values[MOST_ELEMENTS];
    std::memcpy(values, at<space>(warp, address, bytes, bytes, true), bytes);
    for (int part = 0; part < i.aux; ++part) values[part] = F()(values[part], read<T>(warp, i.slots[2 + part], lane));
    put<space>(warp, lane, address, values, bytes, bytes, true);
  }
  return Flow::next;
}

// Slots: the old value, base and offset, the value that is expected, and the new one.
template <class T, Space space>
Flow compare_and_swap(Warp& warp, const Instruction& i, uint32_t mask) {
  EACH_LANE {
    const uint64_t address = address_of(warp, i, 1, lane);
    T before;
    std::memcpy(&before, at<space>(warp, address, sizeof(T), sizeof(T), true), sizeof(T));
    const T after = before == read<T>(warp, i.slots[3], lane) ? read<T>(warp, i.slots[4], lane) : before;
    put<space>(warp, lane, address, &after, sizeof(T), sizeof(T), true);
    write<T>(warp, i.slots[0], lane, before);
  }
  return Flow::next;
}

template <class T>
struct Add { T operator()(T a, T b) const { return static_cast<T>(a + b); } };
template <class T>
struct Least { T operator()(T a, T b) const { return std::min(a, b); } };
template <class T>
struct Greatest { T operator()(T a, T b) const { return std::max(a, b); } };
struct Or { uint32_t operator()(uint32_t a, uint32_t b) const { return a | b; } };
struct And { uint32_t operator()(uint32_t a, uint32_t b) const { return a & b; } };
struct Exchange { uint32_t operator()(uint32_t, uint32_t b) const { return b; } };

template <Space space>
void add_memory(Handlers& handlers, const std::string& name) {
  const auto both = [&]<class T>(T, const std::string& type) {
    handlers["ld." + name + "." + type] = load<T, space>;
    handlers["st." + name + "." + type] = store<T, space>;
  };
  both(int8_t(), "s8"), both(uint8_t(), "u8"), both(uint8_t(), "b8"), both(int16_t(), "s16"), both(uint16_t(), "u16");
  both(uint16_t(), "b16"), both(int32_t(), "s32"), both(uint32_t(), "u32"), both(uint32_t(), "b32"), both(float(), "f32");
  both(int64_t(), "s64"), both(uint64_t(), "u64"), both(uint64_t(), "b64");
  const auto atomics = [&]<class T>(T, const std::string& type) {
    handlers["atom." + name + ".add." + type] = atomic<T, Add<T>, space>;
    handlers["atom." + name + ".min." + type] = atomic<T, Least<T>, space>;
    handlers["atom." + name + ".max." + type] = atomic<T, Greatest<T>, space>;
  };
  atomics(int32_t(), "s32"), atomics(uint32_t(), "u32"), atomics(uint64_t(), "u64"), atomics(float(), "f32");
  handlers["red." + name + ".add.f32"] = reduce_vector<float, Add<float>, space>;
  handlers["atom." + name + ".or.b32"] = atomic<uint32_t, Or, space>;
  handlers["atom." + name + ".and.b32"] = atomic<uint32_t, And, space>;
  handlers["atom." + name + ".exch.b32"] = atomic<uint32_t, Exchange, space>;
  handlers["atom." + name + ".cas.b32"] = compare_and_swap<uint32_t, space>;
}

// Slots: result, its predicate or -1, the value, b and c of the PTX ISA. aux: 0 idx, 1 up, 2 down, 3 bfly.
inline Flow shuffle(Warp& warp, const Instruction& i, uint32_t mask) {
  uint64_t before[LANES];
  std::copy_n(warp.slot(i.slots[2]), LANES, before);
  EACH_LANE {
    const auto b = read<uint32_t>(warp, i.slots[3], lane) & 31, c = read<uint32_t>(warp, i.slots[4], lane);
    const int segment = c >> 8 & 31, limit = c & 31;
    const int last = (lane & segment) | (limit & ~segment), first = lane & segment;
    int from = lane;
    bool inside = true;
    if (i.aux == 0) from = first | (static_cast<int>(b) & ~segment), inside = from <= last;
    if (i.aux == 1) from = lane - static_cast<int>(b), inside = from >= last;
    if (i.aux == 2) from = lane + static_cast<int>(b), inside = from <= last;
    if (i.aux == 3) from = lane ^ static_cast<int>(b), inside = from <= last;
    if (!inside) from = lane;
    if (inside && !(mask >> from & 1)) fault("a shuffle reads a lane that does not take part");
    warp.slot(i.slots[0])[lane] = before[from];
    write<bool>(warp, i.slots[1], lane, inside);
  }
  return Flow::next;
}

inline Flow vote(Warp& warp, const Instruction& i, uint32_t mask) {  // aux: 0 all, 1 any, 2 ballot, 3 uniform
  uint32_t ballot = 0;
  EACH_LANE if (warp.slot(i.slots[1])[lane] & 1) ballot |= 1u << lane;
  const uint64_t result = i.aux == 0 ? ballot == mask : i.aux == 1 ? ballot != 0 : i.aux == 2 ? ballot : !ballot || ballot == mask;
  EACH_LANE warp.slot(i.slots[0])[lane] = result;
  return Flow::next;
}

template <class T, class F>
Flow reduce(Warp& warp, const Instruction& i, uint32_t mask) {
  T result = 0;
  bool first = true;
  EACH_LANE {
    const T value = read<T>(warp, i.slots[1], lane);
    result = first ? value : F()(result, value);
    first = false;
  }
  EACH_LANE write<T>(warp, i.slots[0], lane, result);
  return Flow::next;
}

inline Flow elect(Warp& warp, const Instruction& i, uint32_t mask) {
  const int leader = std::countr_zero(mask);
  EACH_LANE {
    write<uint32_t>(warp, i.slots[0], lane, leader);
    write<bool>(warp, i.slots[1], lane, lane == leader);
  }
  return Flow::next;
}

// Matrices of 8 x 8 elements of 16 bits; lane l gives the address of row l % 8 of matrix l / 8. aux: how many matrices,
// plus 8 if transposed.
template <bool loads>
Flow matrices(Warp& warp, const Instruction& i, uint32_t) {
  const int count = i.aux & 7;
  const bool transposed = i.aux & 8;
  const int registers = loads ? 0 : 2, address = loads ? count : 0;
  for (int matrix = 0; matrix < count; ++matrix) {
    uint16_t elements[8][8];
    for (int row = 0; row < 8; ++row) {
      const int lane = matrix * 8 + row;
      if (loads) std::memcpy(elements[row], look<Space::shared>(warp, ALL_LANES, shared_address(warp, i, address, lane), 16, 16), 16);
    }
    for (int lane = 0; lane < LANES; ++lane) {
      uint64_t& word = warp.slot(i.slots[registers + matrix])[lane];
      uint32_t result = 0;
      for (int half = 0; half < 2; ++half) {
        const int row = transposed ? lane % 4 * 2 + half : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + half;
        if (loads)
          result |= static_cast<uint32_t>(elements[row][column]) << (16 * half);
        else
          elements[row][column] = static_cast<uint16_t>(word >> (16 * half));
      }
      if (loads) word = result;
    }
    for (int row = 0; row < 8 && !loads; ++row) {
      const int lane = matrix * 8 + row;
      put<Space::shared>(warp, lane, shared_address(warp, i, address, lane), elements[row], 16, 16, false, ALL_LANES);
    }
  }
  return Flow::next;
}

inline Flow warp_meet(Warp& warp, const Instruction&, uint32_t mask) {
  meet_lanes(warp, mask);
  return Flow::next;
}

// Those of the lanes whose address is that of `lane`.
inline uint32_t alike(Warp& warp, const Instruction& i, int first, uint32_t mask, int lane) {
  uint32_t lanes = 0;
  for (int other = 0; other < LANES; ++other)
    if (mask >> other & 1 && shared_address(warp, i, first, other) == shared_address(warp, i, first, lane)) lanes |= 1u << other;
  return lanes;
}

// Slots: base and offset, the count or -1. aux: 0 arrive, 1 expect_tx and arrive, 2 expect_tx, 3 init.
inline Flow barrier_arrive(Warp& warp, const Instruction& i, uint32_t mask) {
  Cluster& cluster = *warp.block->cluster;
  EACH_LANE {
    const uint32_t address = shared_address(warp, i, 0, lane);
    const uint64_t number = i.slots[2] < 0 ? 1 : read<uint32_t>(warp, i.slots[2], lane);
    if (i.aux == 3) initialise(cluster, address, number);
    if (i.aux == 1 || i.aux == 2) expect(cluster, address, static_cast<int64_t>(number));
    if (i.aux < 2) arrive(warp, alike(warp, i, 0, mask, lane), address, i.aux ? 1 : number);
  }
  return Flow::next;
}

inline Flow barrier_test(Warp& warp, const Instruction& i, uint32_t mask) {
  bool all = true;
  EACH_LANE {
    const uint32_t address = shared_address(warp, i, 1, lane);
    const bool done = passed(*warp.block->cluster, address, read<uint32_t>(warp, i.slots[3], lane));
    if (done) acquire(warp, alike(warp, i, 1, mask, lane), handed_on(*warp.block->cluster, address));
    warp.slot(i.slots[0])[lane] = done;
    all = all && done;
  }
  return all ? Flow::next : Flow::pause;
}

// Slots: the result or -1, the barrier's number, the number of threads or -1, a predicate or -1. aux: 1 if it waits.
inline Flow barrier_meet(Warp& warp, const Instruction& i, uint32_t mask) {
  const int lane = std::countr_zero(mask);
  Meeting meeting{read<uint32_t>(warp, i.slots[1], lane), -1, i.aux == 1, i.slots[0], false};
  if (i.slots[2] >= 0) meeting.threads = read<int32_t>(warp, i.slots[2], lane);
  if (i.slots[3] >= 0) EACH_LANE meeting.any = meeting.any || (warp.slot(i.slots[3])[lane] & 1);
  meet(warp, meeting);
  return warp.stopped ? Flow::stop : Flow::next;
}

inline Flow cluster_arrive(Warp& warp, const Instruction& i, uint32_t) {  // aux: 1 if it is relaxed
  arrive_at_cluster(warp, i.aux);
  return Flow::next;
}

inline Flow cluster_wait(Warp& warp, const Instruction&, uint32_t) {
  wait_for_cluster(warp);
  return warp.stopped ? Flow::stop : Flow::next;
}

inline Flow proxy_fence(Warp& warp, const Instruction&, uint32_t mask) {
  EACH_LANE warp.block->fenced[warp.thread(lane)] = ++machine(warp).events;
  return Flow::next;
}

// Slots: to (base, offset), the map (base, offset), the coordinates, the mbarrier (base, offset), a mask of blocks or -1.
// aux: the number of coordinates.
inline Flow tensor_load(Warp& warp, const Instruction& i, uint32_t mask) {
  EACH_LANE {
    const uint32_t to = shared_address(warp, i, 0, lane), barrier = shared_address(warp, i, 4 + i.aux, lane);
    const uint64_t map_address = address_of(warp, i, 2, lane);
    aligned(map_address, 64);
    const TensorMap map(reinterpret_cast<const uint64_t*>(machine(warp).global(map_address, 128, false)));
    if (static_cast<int>(map.dims) != i.aux) fault("a tensor map of another number of dimensions");
    int32_t place[TENSOR_DIMS] = {};
    for (int axis = 0; axis < i.aux; ++axis) place[axis] = read<int32_t>(warp, i.slots[4 + axis], lane);
    if (i.slots[6 + i.aux] < 0) {
      load_tensor(warp, lane, map, place, to, barrier);
      continue;
    }
    const auto blocks = read<uint32_t>(warp, i.slots[6 + i.aux], lane) & 0xffff;
    for (uint32_t rank = 0; rank < 16; ++rank)
      if (blocks >> rank & 1) load_tensor(warp, lane, map, place, rank << RANK_SHIFT | offset_of(to), rank << RANK_SHIFT | offset_of(barrier));
  }
  return Flow::next;
}

// Slots: to, from, the bytes, the mbarrier, a mask of blocks or -1; addresses are base and offset.
inline Flow bulk_load(Warp& warp, const Instruction& i, uint32_t mask) {
  EACH_LANE {
    const uint32_t to = shared_address(warp, i, 0, lane), barrier = shared_address(warp, i, 5, lane);
    const auto bytes = read<uint32_t>(warp, i.slots[4], lane);
    const uint64_t from = address_of(warp, i, 2, lane);
    const uint32_t blocks = i.slots[7] < 0 ? 0 : read<uint32_t>(warp, i.slots[7], lane) & 0xffff;
    if (i.slots[7] < 0) load_bulk(warp, lane, from, to, bytes, barrier);
    for (uint32_t rank = 0; rank < 16; ++rank)
      if (blocks >> rank & 1) load_bulk(warp, lane, from, rank << RANK_SHIFT | offset_of(to), bytes, rank << RANK_SHIFT | offset_of(barrier));
  }
  return Flow::next;
}

inline Flow bulk_store(Warp& warp, const Instruction& i, uint32_t mask) {  // aux: 1 if it adds floats, 2 if it adds integers
  EACH_LANE store_bulk(warp, lane, address_of(warp, i, 0, lane), shared_address(warp, i, 2, lane),
                       read<uint32_t>(warp, i.slots[4], lane), i.aux);
  return Flow::next;
}

// Slots: the map, the coordinates, from. aux: the number of coordinates, plus 8 if it adds.
inline Flow tensor_store(Warp& warp, const Instruction& i, uint32_t mask) {
  const int dims = i.aux & 7;
  EACH_LANE {
    const TensorMap map(reinterpret_cast<const uint64_t*>(machine(warp).global(address_of(warp, i, 0, lane), 128, false)));
    int32_t place[TENSOR_DIMS] = {};
    for (int axis = 0; axis < dims; ++axis) place[axis] = read<int32_t>(warp, i.slots[2 + axis], lane);
    store_tensor(warp, lane, map, place, shared_address(warp, i, 2 + dims, lane), i.aux & 8);
  }
  return Flow::next;
}

inline Flow bulk_commit(Warp& warp, const Instruction&, uint32_t mask) {
  EACH_LANE {
    warp.bulk_groups[lane].push_back(std::move(warp.open_bulk[lane]));
    warp.open_bulk[lane] = {};
  }
  return Flow::next;
}

inline Flow bulk_wait(Warp& warp, const Instruction& i, uint32_t mask) {
  EACH_LANE wait_bulk(warp, lane, warp.slot(i.slots[0])[lane]);
  return Flow::next;
}

// cp.async: slots to, from, bytes, and of these those that are read (or -1). The copy is made when it is waited for.
inline Flow copy_later(Warp& warp, const Instruction& i, uint32_t mask) {
  EACH_LANE {
    const uint32_t to = shared_address(warp, i, 0, lane);
    const uint64_t from = address_of(warp, i, 2, lane);
    const auto bytes = read<uint32_t>(warp, i.slots[4], lane);
    const uint32_t used = i.slots[5] < 0 ? bytes : std::min(bytes, read<uint32_t>(warp, i.slots[5], lane));
    aligned(from | to, bytes);
    must_have_waited(warp);
    warp.open_copies[lane].push_back([&warp, lane, from, to, bytes, used] {
      uint8_t value[16] = {};
      if (used) std::memcpy(value, machine(warp).global(from, used, false), used);
      put<Space::shared>(warp, lane, to, value, bytes, bytes);
    });
  }
  return Flow::next;
}

inline Flow copy_commit(Warp& warp, const Instruction&, uint32_t mask) {
  EACH_LANE warp.copy_groups[lane].push_back(std::exchange(warp.open_copies[lane], {}));
  return Flow::next;
}

inline void wait_copies(Warp& warp, int lane, size_t left) {
  auto& groups = warp.copy_groups[lane];
  while (groups.size() > left) {
    for (auto& run : groups.front()) run();
    groups.erase(groups.begin());
  }
}

inline Flow copy_wait(Warp& warp, const Instruction& i, uint32_t mask) {
  EACH_LANE wait_copies(warp, lane, read<uint32_t>(warp, i.slots[0], lane));
  return Flow::next;
}

// cp.async.mbarrier.arrive.noinc: slots of the mbarrier. The lane's copies are made, and then it arrives.
inline Flow copy_arrive(Warp& warp, const Instruction& i, uint32_t mask) {
  copy_commit(warp, i, mask);
  EACH_LANE {
    wait_copies(warp, lane, 0);
    arrive(warp, 1u << lane, shared_address(warp, i, 0, lane), 1);
  }
  return Flow::next;
}

inline Flow copy_wait_all(Warp& warp, const Instruction& i, uint32_t mask) {
  copy_commit(warp, i, mask);
  EACH_LANE wait_copies(warp, lane, 0);
  return Flow::next;
}

// st.async: slots to, mbarrier, values. The store is made at some later time; its bytes then count at the mbarrier.
inline Flow store_later(Warp& warp, const Instruction& i, uint32_t mask) {
  Cluster& cluster = *warp.block->cluster;
  const uint32_t bytes = static_cast<uint32_t>(i.aux) * WORD;
  EACH_LANE {
    const uint32_t to = shared_address(warp, i, 0, lane), barrier = shared_address(warp, i, 2, lane);
    std::vector<uint32_t> words;
    for (int element = 0; element < i.aux; ++element) words.push_back(read<uint32_t>(warp, i.slots[4 + element], lane));
    const Clock known = note_copy(warp, lane, owner(cluster, to), offset_of(to), bytes);
    aligned(offset_of(to), bytes);
    barrier_at(cluster, barrier);
    cluster.copies.push_back({[&cluster, words, to, bytes, barrier, known] {
      std::memcpy(shared(cluster, to, bytes), words.data(), bytes);
      join(handed_on(cluster, barrier), known);
      complete(cluster, barrier, bytes);
    }});
  }
  return Flow::next;
}

// Slots: the accumulator's registers, A (4 registers, or a descriptor), B's descriptor, the predicate of adding.
// aux: the columns; the depth << 10; the format << 20 (0 bf16, 1 f16, 2 e4m3); A in registers << 24; A and B transposed << 25, 26.
inline Flow product(Warp& warp, const Instruction& i, uint32_t) {
  constexpr Format formats[3] = {BF16, F16, E4M3};
  const int format = i.aux >> 20 & 15;
  const Shape shape{i.aux & 1023, i.aux >> 10 & 1023, formats[format], format == 2 ? 1 : 2};
  const bool registers = i.aux >> 24 & 1;
  const int first = shape.columns / 2, behind = first + (registers ? 4 : 1);
  std::vector<float> a(16 * shape.depth), b(static_cast<size_t>(shape.columns) * shape.depth);
  if (registers) {
    fragment(warp, i.slots + first, shape, a.data());
  } else {
    const Operand operand(warp.slot(i.slots[first])[0], i.aux >> 25 & 1, 64, shape.depth, shape.element);
    read_operand(warp, operand, shape.format, warp.index % 4 * 16, 16, a.data());
  }
  const Operand operand(warp.slot(i.slots[behind])[0], i.aux >> 26 & 1, shape.columns, shape.depth, shape.element);
  read_operand(warp, operand, shape.format, 0, shape.columns, b.data());
  accumulate(warp, i.slots, a.data(), b.data(), shape, warp.slot(i.slots[behind + 1])[0] & 1);
  return Flow::next;
}

// mma.m16n8k16 of 16-bit numbers: slots D (4), A (4), B (2), C (4). aux: 0 for bf16, 1 for f16.
inline Flow small_product(Warp& warp, const Instruction& i, uint32_t) {
  constexpr int depth = 16, columns = 8;
  const Shape shape{columns, depth, i.aux ? F16 : BF16, 2};
  float a[16 * depth], b[columns * depth];
  fragment(warp, i.slots + 4, shape, a);
  const float* decoded = table(shape.format);
  for (int lane = 0; lane < LANES; ++lane)
    for (int part = 0; part < 2; ++part)
      for (int half = 0; half < 2; ++half) {
        const auto word = static_cast<uint32_t>(warp.slot(i.slots[8 + part])[lane]);
        b[lane / 4 * depth + lane % 4 * 2 + part * 8 + half] = decoded[word >> (16 * half) & 0xffff];
      }
  uint64_t before[4][LANES];
  for (int part = 0; part < 4; ++part) std::copy_n(warp.slot(i.slots[10 + part]), LANES, before[part]);
  for (int part = 0; part < 4; ++part) std::copy_n(before[part], LANES, warp.slot(i.slots[part]));
  accumulate(warp, i.slots, a, b, shape, true);
  return Flow::next;
}

inline Flow products_commit(Warp& warp, const Instruction&, uint32_t) {
  warp.product_groups.push_back(std::move(warp.open_products));
  warp.open_products.clear();
  return Flow::next;
}

inline Flow kernels_wait(Warp& warp, const Instruction&, uint32_t) {
  warp.waited = true;
  return Flow::next;
}

inline Flow products_wait(Warp& warp, const Instruction& i, uint32_t) {
  wait_products(warp, warp.slot(i.slots[0])[0]);
  return Flow::next;
}

inline void add_exchange(Handlers& handlers) {
  add_memory<Space::global>(handlers, "global");
  add_memory<Space::shared>(handlers, "shared");
  handlers["shfl"] = shuffle;
  handlers["vote"] = vote;
  handlers["redux.add.s32"] = handlers["redux.add.u32"] = reduce<uint32_t, Add<uint32_t>>;
  handlers["redux.max.s32"] = reduce<int32_t, Greatest<int32_t>>;
  handlers["redux.min.s32"] = reduce<int32_t, Least<int32_t>>;
  handlers["redux.max.u32"] = reduce<uint32_t, Greatest<uint32_t>>;
  handlers["redux.min.u32"] = reduce<uint32_t, Least<uint32_t>>;
  handlers["redux.or.b32"] = reduce<uint32_t, Or>;
  handlers["redux.and.b32"] = reduce<uint32_t, And>;
  handlers["elect"] = elect;
  handlers["ldmatrix"] = matrices<true>;
  handlers["stmatrix"] = matrices<false>;
  handlers["mbarrier.arrive"] = barrier_arrive;
  handlers["mbarrier.test"] = barrier_test;
  handlers["bar"] = barrier_meet;
  handlers["bar.warp"] = warp_meet;
  handlers["cluster.arrive"] = cluster_arrive;
  handlers["cluster.wait"] = cluster_wait;
  handlers["fence.proxy.async"] = proxy_fence;
  handlers["tensor_load"] = tensor_load;
  handlers["tensor_store"] = tensor_store;
  handlers["bulk_load"] = bulk_load;
  handlers["bulk_store"] = bulk_store;
  handlers["bulk_commit"] = bulk_commit;
  handlers["bulk_wait"] = bulk_wait;
  handlers["copy_later"] = copy_later;
  handlers["copy_commit"] = copy_commit;
  handlers["copy_wait"] = copy_wait;
  handlers["copy_arrive"] = copy_arrive;
  handlers["copy_wait_all"] = copy_wait_all;
  handlers["griddepcontrol.wait"] = kernels_wait;
  handlers["store_later"] = store_later;
  handlers["wgmma"] = product;
  handlers["mma"] = small_product;
  handlers["wgmma.commit"] = products_commit;
  handlers["wgmma.wait"] = products_wait;
  handlers["mapa"] = OP2(uint32_t, uint32_t, offset_of(a) | b << RANK_SHIFT);
  handlers["to_generic"] = OP1(uint64_t, uint64_t, a + SHARED_WINDOW);
  handlers["from_generic"] = OP1(uint64_t, uint64_t, a >= SHARED_WINDOW ? a - SHARED_WINDOW : a);
  handlers["nop"] = HANDLER { return Flow::next; };
  handlers["sleep"] = HANDLER { return Flow::pause; };
}
