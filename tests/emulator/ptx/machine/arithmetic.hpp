// Instructions that compute in registers, lane by lane.
#pragma once

#include <algorithm>
#include <bit>
#include <cfenv>
#include <type_traits>
#include <unordered_map>

#include "memory.hpp"

using Handlers = std::unordered_map<std::string, Handler>;

template <class T>
T read(Warp& warp, int32_t slot, int lane) {
  const uint64_t raw = warp.slot(slot)[lane];
  if constexpr (std::is_same_v<T, float>)
    return bits<float>(static_cast<uint32_t>(raw));
  else
    return static_cast<T>(raw);
}

template <class T>
void write(Warp& warp, int32_t slot, int lane, T value) {
  if (slot < 0) return;
  if constexpr (std::is_same_v<T, float>)
    warp.slot(slot)[lane] = bits<uint32_t>(value);
  else if constexpr (std::is_signed_v<T>)
    warp.slot(slot)[lane] = static_cast<uint64_t>(static_cast<int64_t>(value));
  else
    warp.slot(slot)[lane] = value;
}

#define EACH_LANE for (int lane = 0; lane < LANES; ++lane) if (mask >> lane & 1)
#define HANDLER \
  []([[maybe_unused]] Warp& warp, [[maybe_unused]] const Instruction& i, [[maybe_unused]] uint32_t mask) -> Flow
// An operator of one, two and three operands of type S with a result of type D.
#define OP1(D, S, RESULT) \
  HANDLER { EACH_LANE { const S a = read<S>(warp, i.slots[1], lane); write<D>(warp, i.slots[0], lane, static_cast<D>(RESULT)); } return Flow::next; }
#define OP2(D, S, RESULT)                                                                    \
  HANDLER {                                                                                  \
    EACH_LANE {                                                                              \
      const S a = read<S>(warp, i.slots[1], lane), b = read<S>(warp, i.slots[2], lane);      \
      write<D>(warp, i.slots[0], lane, static_cast<D>(RESULT));                              \
    }                                                                                        \
    return Flow::next;                                                                       \
  }
#define OP3(D, S, RESULT)                                                                    \
  HANDLER {                                                                                  \
    EACH_LANE {                                                                              \
      const S a = read<S>(warp, i.slots[1], lane), b = read<S>(warp, i.slots[2], lane);      \
      const D c = read<D>(warp, i.slots[3], lane);                                           \
      write<D>(warp, i.slots[0], lane, static_cast<D>(RESULT));                              \
    }                                                                                        \
    return Flow::next;                                                                       \
  }

template <class T>
T shift(T value, uint32_t by, bool left) {
  constexpr uint32_t width = sizeof(T) * 8;
  if (left) return by >= width ? T(0) : static_cast<T>(static_cast<std::make_unsigned_t<T>>(value) << by);
  return by >= width ? static_cast<T>(value < 0 ? -1 : 0) : static_cast<T>(value >> by);
}

template <class T>
T divide(T a, T b) {
  if (!b) fault("divides by zero");
  return static_cast<T>(a / b);
}

template <class T, class Wide>
void add_integer(Handlers& handlers, const std::string& type) {
  using U = std::make_unsigned_t<T>;
  handlers["add." + type] = OP2(T, U, static_cast<U>(a + b));
  handlers["sub." + type] = OP2(T, U, static_cast<U>(a - b));
  handlers["mul.lo." + type] = OP2(T, U, static_cast<U>(static_cast<uint64_t>(a) * b));
  handlers["mul.hi." + type] = OP2(T, T, static_cast<Wide>(a) * static_cast<Wide>(b) >> (sizeof(T) * 8));
  handlers["mad.lo." + type] = OP3(T, U, static_cast<U>(static_cast<uint64_t>(a) * b + static_cast<U>(c)));
  handlers["div." + type] = OP2(T, T, divide(a, b));
  handlers["rem." + type] = OP2(T, T, static_cast<T>(a - divide(a, b) * b));
  handlers["min." + type] = OP2(T, T, std::min(a, b));
  handlers["max." + type] = OP2(T, T, std::max(a, b));
  handlers["min.relu." + type] = OP2(T, T, std::max<T>(std::min(a, b), 0));
  handlers["max.relu." + type] = OP2(T, T, std::max<T>(std::max(a, b), 0));
  handlers["shr." + type] = HANDLER {
    EACH_LANE write<T>(warp, i.slots[0], lane, shift(read<T>(warp, i.slots[1], lane), read<uint32_t>(warp, i.slots[2], lane), false));
    return Flow::next;
  };
  handlers["setp.lt." + type] = OP2(bool, T, a < b);
  handlers["setp.le." + type] = OP2(bool, T, a <= b);
  handlers["setp.gt." + type] = OP2(bool, T, a > b);
  handlers["setp.ge." + type] = OP2(bool, T, a >= b);
  handlers["setp.eq." + type] = OP2(bool, T, a == b);
  handlers["setp.ne." + type] = OP2(bool, T, a != b);
  handlers["neg." + type] = OP1(T, U, static_cast<U>(0 - a));
  handlers["abs." + type] = OP1(T, T, a < 0 ? 0 - a : a);
}

template <class T>
void add_bits(Handlers& handlers, const std::string& type) {
  handlers["and." + type] = OP2(T, T, a & b);
  handlers["or." + type] = OP2(T, T, a | b);
  handlers["xor." + type] = OP2(T, T, a ^ b);
  handlers["not." + type] = OP1(T, T, ~a);
  handlers["setp.eq." + type] = OP2(bool, T, a == b);
  handlers["setp.ne." + type] = OP2(bool, T, a != b);
  handlers["shl." + type] = HANDLER {
    EACH_LANE write<T>(warp, i.slots[0], lane, shift(read<T>(warp, i.slots[1], lane), read<uint32_t>(warp, i.slots[2], lane), true));
    return Flow::next;
  };
  handlers["brev." + type] = HANDLER {
    EACH_LANE {
      T value = read<T>(warp, i.slots[1], lane), result = 0;
      for (size_t bit = 0; bit < sizeof(T) * 8; ++bit) result |= (value >> bit & 1) << (sizeof(T) * 8 - 1 - bit);
      write<T>(warp, i.slots[0], lane, result);
    }
    return Flow::next;
  };
}

template <class D, class S>
void add_conversion(Handlers& handlers, const std::string& to, const std::string& from) {
  handlers["cvt." + to + "." + from] = OP1(D, S, a);
}

template <class D>
void add_conversions(Handlers& handlers, const std::string& to) {
  add_conversion<D, int8_t>(handlers, to, "s8");
  add_conversion<D, uint8_t>(handlers, to, "u8");
  add_conversion<D, int16_t>(handlers, to, "s16");
  add_conversion<D, uint16_t>(handlers, to, "u16");
  add_conversion<D, int32_t>(handlers, to, "s32");
  add_conversion<D, uint32_t>(handlers, to, "u32");
  add_conversion<D, int64_t>(handlers, to, "s64");
  add_conversion<D, uint64_t>(handlers, to, "u64");
}

template <class T>
T to_integer(float value) {
  if (std::isnan(value)) return 0;
  const double limit_low = static_cast<double>(std::numeric_limits<T>::min());
  const double limit_high = static_cast<double>(std::numeric_limits<T>::max());
  if (value <= limit_low) return std::numeric_limits<T>::min();
  if (value >= limit_high) return std::numeric_limits<T>::max();
  return static_cast<T>(value);
}

inline float greater(float a, float b) { return std::fmax(a, b); }
inline float with_nan(float a, float b, float result) { return a != a || b != b ? bits<float>(0x7fffffffu) : result; }

inline void add_floats(Handlers& handlers) {
  handlers["add.f32"] = OP2(float, float, a + b);
  handlers["sub.f32"] = OP2(float, float, a - b);
  handlers["mul.f32"] = OP2(float, float, a * b);
  handlers["div.f32"] = OP2(float, float, a / b);
  handlers["fma.f32"] = OP3(float, float, std::fma(a, b, c));
  handlers["max.f32"] = OP2(float, float, std::fmax(a, b));
  handlers["min.f32"] = OP2(float, float, std::fmin(a, b));
  handlers["max.NaN.f32"] = OP2(float, float, with_nan(a, b, std::fmax(a, b)));
  handlers["min.NaN.f32"] = OP2(float, float, with_nan(a, b, std::fmin(a, b)));
  handlers["neg.f32"] = OP1(float, float, -a);
  handlers["abs.f32"] = OP1(float, float, std::fabs(a));
  handlers["sqrt.f32"] = OP1(float, float, std::sqrt(a));
  handlers["ex2.approx.ftz.f32"] = OP1(float, float, flush(std::exp2(flush(a))));
  handlers["lg2.approx.ftz.f32"] = OP1(float, float, std::log2(flush(a)));
  handlers["rcp.approx.ftz.f32"] = OP1(float, float, flush(1.f / flush(a)));
  handlers["rsqrt.approx.ftz.f32"] = OP1(float, float, 1.f / std::sqrt(flush(a)));
  handlers["rcp.rn.f32"] = OP1(float, float, 1.f / a);
  handlers["rcp.approx.f32"] = handlers["rcp.rn.f32"];
  handlers["rsqrt.approx.f32"] = OP1(float, float, 1.f / std::sqrt(a));
  handlers["mul.sat.f32"] = OP2(float, float, std::isnan(a * b) ? 0.f : std::clamp(a * b, 0.f, 1.f));
  handlers["setp.eq.f32"] = OP2(bool, float, a == b);
  handlers["setp.ne.f32"] = OP2(bool, float, a < b || a > b);
  handlers["setp.equ.f32"] = OP2(bool, float, !(a < b || a > b));
  handlers["setp.neu.f32"] = OP2(bool, float, a != b);
  handlers["setp.lt.f32"] = OP2(bool, float, a < b);
  handlers["setp.le.f32"] = OP2(bool, float, a <= b);
  handlers["setp.gt.f32"] = OP2(bool, float, a > b);
  handlers["setp.ge.f32"] = OP2(bool, float, a >= b);
  handlers["setp.ltu.f32"] = OP2(bool, float, !(a >= b));
  handlers["setp.leu.f32"] = OP2(bool, float, !(a > b));
  handlers["setp.gtu.f32"] = OP2(bool, float, !(a <= b));
  handlers["setp.geu.f32"] = OP2(bool, float, !(a < b));
  handlers["setp.nan.f32"] = OP2(bool, float, a != a || b != b);
  handlers["setp.num.f32"] = OP2(bool, float, a == a && b == b);
  handlers["cvt.f32.s32"] = OP1(float, int32_t, a);
  handlers["cvt.f32.u32"] = OP1(float, uint32_t, a);
  handlers["cvt.f32.s64"] = OP1(float, int64_t, a);
  handlers["cvt.rzi.s32.f32"] = OP1(int32_t, float, to_integer<int32_t>(a));
  handlers["cvt.rzi.u32.f32"] = OP1(uint32_t, float, to_integer<uint32_t>(a));
  handlers["cvt.rni.s32.f32"] = OP1(int32_t, float, to_integer<int32_t>(std::nearbyint(a)));
  handlers["cvt.rmi.f32.f32"] = OP1(float, float, std::floor(a));
  handlers["cvt.rpi.f32.f32"] = OP1(float, float, std::ceil(a));
  handlers["cvt.rni.f32.f32"] = OP1(float, float, std::nearbyint(a));
}

inline uint32_t narrow_towards_zero(Format format, float value) {
  const int before = std::fegetround();
  std::fesetround(FE_TOWARDZERO);
  const uint32_t code = narrow(format, value);
  std::fesetround(before);
  const bool infinite = !std::isfinite(widen(format, code));
  return infinite && std::isfinite(value) ? code - 1 : code;  // the greatest number of its sign
}

template <class F>
uint32_t halves(uint32_t a, uint32_t b, Format format, F operation) {
  const auto half = [&](int shift_by) {
    const float result = operation(widen(format, a >> shift_by & 0xffff), widen(format, b >> shift_by & 0xffff));
    return narrow(format, result) << shift_by;
  };
  return half(0) | half(16);
}

// Two float32 in one register of 64 bits, as Blackwell computes with them.
template <class F>
uint64_t pairs(uint64_t a, uint64_t b, uint64_t c, F operation) {
  const auto half = [&](int by) {
    const auto number = [&](uint64_t pair) { return bits<float>(static_cast<uint32_t>(pair >> by)); };
    return static_cast<uint64_t>(bits<uint32_t>(operation(number(a), number(b), number(c)))) << by;
  };
  return half(0) | half(32);
}

inline void add_pairs(Handlers& handlers) {
  handlers["add.f32x2"] = OP2(uint64_t, uint64_t, pairs(a, b, 0, [](float x, float y, float) { return x + y; }));
  handlers["sub.f32x2"] = OP2(uint64_t, uint64_t, pairs(a, b, 0, [](float x, float y, float) { return x - y; }));
  handlers["mul.f32x2"] = OP2(uint64_t, uint64_t, pairs(a, b, 0, [](float x, float y, float) { return x * y; }));
  handlers["fma.f32x2"] =
      OP3(uint64_t, uint64_t, pairs(a, b, c, [](float x, float y, float z) { return std::fma(x, y, z); }));
}

inline void add_narrow(Handlers& handlers) {
  handlers["cvt.f32.bf16"] = OP1(float, uint32_t, widen(BF16, a & 0xffff));
  handlers["cvt.f32.f16"] = OP1(float, uint32_t, widen(F16, a & 0xffff));
  handlers["cvt.bf16.f32"] = OP1(uint32_t, float, narrow(BF16, a));
  handlers["cvt.f16.f32"] = OP1(uint32_t, float, narrow(F16, a));
  handlers["cvt.bf16x2.f32"] = OP2(uint32_t, float, narrow(BF16, a) << 16 | narrow(BF16, b));
  handlers["cvt.f16x2.f32"] = OP2(uint32_t, float, narrow(F16, a) << 16 | narrow(F16, b));
  handlers["cvt.rz.f16x2.f32"] = OP2(uint32_t, float, narrow_towards_zero(F16, a) << 16 | narrow_towards_zero(F16, b));
  handlers["cvt.e4m3x2.f32"] = OP2(uint32_t, float, narrow(E4M3, a) << 8 | narrow(E4M3, b));
  handlers["cvt.e4m3x2.f16x2"] =
      OP1(uint32_t, uint32_t, narrow(E4M3, widen(F16, a >> 16)) << 8 | narrow(E4M3, widen(F16, a & 0xffff)));
  handlers["cvt.f16x2.e4m3x2"] =
      OP1(uint32_t, uint32_t, narrow(F16, widen(E4M3, a >> 8 & 255)) << 16 | narrow(F16, widen(E4M3, a & 255)));
  handlers["add.f16x2"] = OP2(uint32_t, uint32_t, halves(a, b, F16, [](float x, float y) { return x + y; }));
  handlers["mul.f16x2"] = OP2(uint32_t, uint32_t, halves(a, b, F16, [](float x, float y) { return x * y; }));
  handlers["max.f16x2"] = OP2(uint32_t, uint32_t, halves(a, b, F16, greater));
  handlers["add.bf16x2"] = OP2(uint32_t, uint32_t, halves(a, b, BF16, [](float x, float y) { return x + y; }));
  handlers["mul.bf16x2"] = OP2(uint32_t, uint32_t, halves(a, b, BF16, [](float x, float y) { return x * y; }));
  handlers["mul.bf16"] = OP2(uint16_t, uint16_t, narrow(BF16, widen(BF16, a) * widen(BF16, b)));
  handlers["add.bf16"] = OP2(uint16_t, uint16_t, narrow(BF16, widen(BF16, a) + widen(BF16, b)));
  handlers["max.bf16x2"] = OP2(uint32_t, uint32_t, halves(a, b, BF16, greater));
  handlers["abs.f16x2"] = handlers["abs.bf16x2"] = OP1(uint32_t, uint32_t, a & 0x7fff7fffu);
  handlers["neg.f16x2"] = handlers["neg.bf16x2"] = OP1(uint32_t, uint32_t, a ^ 0x80008000u);
}

inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selectors) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int position = 0; position < 4; ++position) {
    const uint32_t selector = selectors >> (4 * position) & 15;
    uint32_t byte = bytes >> (8 * (selector & 7)) & 255;
    if (selector & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << (8 * position);
  }
  return result;
}

inline Flow copy(Warp& warp, const Instruction& i, uint32_t mask) {
  EACH_LANE warp.slot(i.slots[0])[lane] = warp.slot(i.slots[1])[lane];
  return Flow::next;
}

inline Flow select(Warp& warp, const Instruction& i, uint32_t mask) {
  EACH_LANE warp.slot(i.slots[0])[lane] = warp.slot(i.slots[(warp.slot(i.slots[3])[lane] & 1) ? 1 : 2])[lane];
  return Flow::next;
}

// One register from several of aux bits each, and back.
inline Flow pack(Warp& warp, const Instruction& i, uint32_t mask) {
  EACH_LANE {
    uint64_t value = 0;
    for (int part = 1; part < i.count; ++part)
      value |= (warp.slot(i.slots[part])[lane] & ((1ull << i.aux) - 1)) << (i.aux * (part - 1));
    warp.slot(i.slots[0])[lane] = value;
  }
  return Flow::next;
}

inline Flow unpack(Warp& warp, const Instruction& i, uint32_t mask) {
  EACH_LANE {
    const uint64_t value = warp.slot(i.slots[i.count - 1])[lane];
    for (int part = 0; part + 1 < i.count; ++part)
      if (i.slots[part] >= 0) warp.slot(i.slots[part])[lane] = value >> (i.aux * part) & ((1ull << i.aux) - 1);
  }
  return Flow::next;
}

inline void add_arithmetic(Handlers& handlers) {
  add_integer<int16_t, int32_t>(handlers, "s16");
  add_integer<uint16_t, uint32_t>(handlers, "u16");
  add_integer<int32_t, int64_t>(handlers, "s32");
  add_integer<uint32_t, uint64_t>(handlers, "u32");
  add_integer<int64_t, __int128>(handlers, "s64");
  add_integer<uint64_t, unsigned __int128>(handlers, "u64");
  add_bits<uint16_t>(handlers, "b16");
  add_bits<uint32_t>(handlers, "b32");
  add_bits<uint64_t>(handlers, "b64");
  add_conversions<int8_t>(handlers, "s8");
  add_conversions<uint8_t>(handlers, "u8");
  add_conversions<int16_t>(handlers, "s16");
  add_conversions<uint16_t>(handlers, "u16");
  add_conversions<int32_t>(handlers, "s32");
  add_conversions<uint32_t>(handlers, "u32");
  add_conversions<int64_t>(handlers, "s64");
  add_conversions<uint64_t>(handlers, "u64");
  add_floats(handlers);
  add_narrow(handlers);
  add_pairs(handlers);
  handlers["and.pred"] = OP2(bool, bool, a && b);
  handlers["or.pred"] = OP2(bool, bool, a || b);
  handlers["xor.pred"] = OP2(bool, bool, a != b);
  handlers["not.pred"] = OP1(bool, bool, !a);
  handlers["mul.wide.s16"] = OP2(int32_t, int16_t, static_cast<int32_t>(a) * b);
  handlers["mul.wide.u16"] = OP2(uint32_t, uint16_t, static_cast<uint32_t>(a) * b);
  handlers["mul.wide.s32"] = OP2(int64_t, int32_t, static_cast<int64_t>(a) * b);
  handlers["mul.wide.u32"] = OP2(uint64_t, uint32_t, static_cast<uint64_t>(a) * b);
  handlers["mad.wide.s32"] = OP3(int64_t, int32_t, static_cast<int64_t>(a) * b + c);
  handlers["mad.wide.u32"] = OP3(uint64_t, uint32_t, static_cast<uint64_t>(a) * b + c);
  handlers["popc.b32"] = OP1(uint32_t, uint32_t, std::popcount(a));
  handlers["popc.b64"] = OP1(uint32_t, uint64_t, std::popcount(a));
  handlers["clz.b32"] = OP1(uint32_t, uint32_t, std::countl_zero(a));
  handlers["clz.b64"] = OP1(uint32_t, uint64_t, std::countl_zero(a));
  handlers["dp2a.lo.u32.u32"] = OP3(uint32_t, uint32_t, c + (a & 0xffff) * (b & 255) + (a >> 16) * (b >> 8 & 255));
  handlers["prmt.b32"] = OP3(uint32_t, uint32_t, permute(a, b, c));
  handlers["lop3.b32"] = HANDLER {
    EACH_LANE {
      const auto a = read<uint32_t>(warp, i.slots[1], lane), b = read<uint32_t>(warp, i.slots[2], lane);
      const auto c = read<uint32_t>(warp, i.slots[3], lane), code = read<uint32_t>(warp, i.slots[4], lane);
      uint32_t result = 0;
      for (int bit = 0; bit < 32; ++bit)
        result |= (code >> ((a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1)) & 1) << bit;
      write<uint32_t>(warp, i.slots[0], lane, result);
    }
    return Flow::next;
  };
  handlers["mov"] = copy;
  handlers["selp"] = select;
  handlers["pack"] = pack;
  handlers["unpack"] = unpack;
}
