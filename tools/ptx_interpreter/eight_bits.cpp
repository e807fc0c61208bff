// Conversions of fp32 to 8-bit numbers. PTX ISA 9, chapter 9.7.9.21.
#include <algorithm>
#include <cmath>

#include "lanes.h"

namespace interpreter {

namespace {

// Rounds to nearest, ties to even; numbers beyond the largest number, 448, become 448.
uint16_t to_e4m3(float x) {
  if (x != x) return 0x7F;
  const uint16_t sign = std::signbit(x) ? 0x80 : 0;
  const float size = std::fmin(std::fabs(x), 448.0f);
  if (size < 0x1p-6f) return sign | static_cast<uint16_t>(std::nearbyint(size * 0x1p9f));
  const int exponent = std::ilogb(size);
  return sign | static_cast<uint16_t>((exponent + 6) * 8 + std::nearbyint(std::ldexp(size, 3 - exponent)));
}

}  // namespace

void add_eight_bits(Opcodes& to) {
  constexpr auto nearest = [](float a) {
    if (a != a) return 0;
    return static_cast<int32_t>(std::fmin(std::fmax(std::nearbyint(a), -0x1p31f), 0x1.fffffep30f));
  };
  to["cvt.rni.s32.f32"] = {"ww", unary<int32_t, float, nearest>};
  // The first operand becomes the high byte of two bytes. The lower half of the last operand stays above the bytes.
  constexpr auto two_bytes = [](int32_t high, int32_t low, uint32_t above) {
    const auto byte = [](int32_t x) { return static_cast<uint8_t>(std::clamp(x, -128, 127)); };
    return above << 16 | uint32_t{byte(high)} << 8 | byte(low);
  };
  to["cvt.pack.sat.s8.s32.b32"] = {"wwww", ternary<uint32_t, int32_t, uint32_t, two_bytes>};
  constexpr auto two_small = [](float high, float low) { return uint16_t(to_e4m3(high) << 8 | to_e4m3(low)); };
  constexpr auto two_halves = [](uint16_t two) {
    return uint32_t{to_fp16(from_e4m3(two >> 8))} << 16 | to_fp16(from_e4m3(two & 0xFF));
  };
  to["cvt.rn.f16x2.e4m3x2"] = {"wh", unary<uint32_t, uint16_t, two_halves>};
  to["cvt.rn.satfinite.e4m3x2.f32"] = {"hww", binary<uint16_t, float, float, two_small>};
}

}  // namespace interpreter
