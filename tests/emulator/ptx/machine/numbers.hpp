// Number formats: bits in registers and memory as C++ values, and rounding to the narrow ones.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

template <class To, class From>
To bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

// A format of one sign bit, `exponent` and `mantissa` bits. e4m3 has no infinity: its greatest code is NaN.
struct Format {
  int exponent, mantissa;
  bool infinity;
};
constexpr Format BF16{8, 7, true}, F16{5, 10, true}, E4M3{4, 3, false};

inline float widen(Format format, uint32_t code) {
  const int bias = (1 << (format.exponent - 1)) - 1;
  const uint32_t mantissa = code & ((1u << format.mantissa) - 1);
  const uint32_t exponent = (code >> format.mantissa) & ((1u << format.exponent) - 1);
  const float sign = (code >> (format.mantissa + format.exponent)) & 1 ? -1.f : 1.f;
  const uint32_t greatest = (1u << format.exponent) - 1;
  if (exponent == greatest) {
    if (!format.infinity && mantissa == (1u << format.mantissa) - 1) return std::numeric_limits<float>::quiet_NaN();
    if (format.infinity)
      return mantissa ? std::numeric_limits<float>::quiet_NaN() : sign * std::numeric_limits<float>::infinity();
  }
  if (!exponent) return sign * std::ldexp(static_cast<float>(mantissa), 1 - bias - format.mantissa);
  return sign * std::ldexp(1.f + std::ldexp(static_cast<float>(mantissa), -format.mantissa),
                           static_cast<int>(exponent) - bias);
}

// Round to nearest, ties to even. Without infinities, numbers too large become the greatest finite one (satfinite).
inline uint32_t narrow(Format format, float value) {
  const int bias = (1 << (format.exponent - 1)) - 1;
  const uint32_t sign = std::signbit(value) ? 1u << (format.mantissa + format.exponent) : 0;
  const uint32_t greatest = ((1u << format.exponent) - 1) << format.mantissa;
  if (std::isnan(value)) return sign | greatest | ((1u << format.mantissa) - 1);
  const double size = std::fabs(static_cast<double>(value));
  const int least = 1 - bias;
  int exponent = size > 0 && std::isfinite(size) ? std::max(std::ilogb(size), least) : least;
  double units = std::nearbyint(std::ldexp(size, format.mantissa - exponent));
  if (units >= std::ldexp(2.0, format.mantissa)) units /= 2, ++exponent;
  const bool subnormal = units < std::ldexp(1.0, format.mantissa);
  const int largest = (1 << format.exponent) - 1 - bias - (format.infinity ? 1 : 0);
  const double most = format.infinity ? std::ldexp(2.0, format.mantissa) : std::ldexp(2.0, format.mantissa) - 2;
  if (!std::isfinite(size) || exponent > largest || (exponent == largest && units > most))
    return sign | (format.infinity ? greatest : greatest | ((1u << format.mantissa) - 2));
  if (subnormal) return sign | static_cast<uint32_t>(units);
  return sign | static_cast<uint32_t>(exponent + bias) << format.mantissa |
         (static_cast<uint32_t>(units) - (1u << format.mantissa));
}

inline float flush(float value) { return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.f, value) : value; }

// The values of all codes of 16 and 8 bits.
inline const float* table(Format format) {
  static const auto make = [](Format of, int codes) {
    auto* values = new float[codes];
    for (int code = 0; code < codes; ++code) values[code] = widen(of, code);
    return values;
  };
  static const float *bf16 = make(BF16, 1 << 16), *f16 = make(F16, 1 << 16), *e4m3 = make(E4M3, 1 << 8);
  return format.exponent == BF16.exponent ? bf16 : format.exponent == F16.exponent ? f16 : e4m3;
}
