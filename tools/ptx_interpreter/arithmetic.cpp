// Operations of a lane on registers, and exchanges between the lanes of a warp. PTX ISA 9, chapter 9.7.
#include <cmath>
#include <limits>

#include "lanes.h"

namespace interpreter {

namespace {

template <typename T>
Outcome select(Warp& w, const Instruction& in, uint32_t lanes) {
  T* d = w.lanes<T>(in.operands[0].at);
  const T *a = w.lanes<T>(in.operands[1].at), *b = w.lanes<T>(in.operands[2].at);
  const uint32_t chosen = w.predicate(in.operands[3].at);
  each_lane(lanes, [&](int i) { d[i] = (chosen >> i & 1) != 0 ? a[i] : b[i]; });
  return Outcome::kNext;
}

template <typename A, auto holds>
Outcome compare(Warp& w, const Instruction& in, uint32_t lanes) {
  const A *a = w.lanes<A>(in.operands[1].at), *b = w.lanes<A>(in.operands[2].at);
  uint32_t result = 0;
  each_lane(lanes, [&](int i) { result |= static_cast<uint32_t>(holds(a[i], b[i])) << i; });
  uint32_t& d = w.predicate(in.operands[0].at);
  d = (d & ~lanes) | result;
  return Outcome::kNext;
}

// Logic of predicates: the lanes of a predicate are bits of a word.
template <auto work>
Outcome logic(Warp& w, const Instruction& in, uint32_t lanes) {
  const uint32_t a = w.predicate(in.operands[1].at);
  const int second = in.operands[2].at;
  uint32_t& d = w.predicate(in.operands[0].at);
  d = (d & ~lanes) | (static_cast<uint32_t>(work(a, second < 0 ? 0 : w.predicate(second))) & lanes);
  return Outcome::kNext;
}

// Packs parts into a register, from low to high.
template <typename Whole, typename Part>
Outcome pack(Warp& w, const Instruction& in, uint32_t lanes) {
  Whole* d = w.lanes<Whole>(in.operands[0].at);
  each_lane(lanes, [&](int i) {
    Whole combined = 0;
    for (size_t part = 0; part < in.many.size(); ++part)
      combined |= static_cast<Whole>(w.lanes<Part>(in.many[part])[i]) << (8 * sizeof(Part) * part);
    d[i] = combined;
  });
  return Outcome::kNext;
}

template <typename Whole, typename Part>
Outcome unpack(Warp& w, const Instruction& in, uint32_t lanes) {
  const Whole* a = w.lanes<Whole>(in.operands[1].at);
  each_lane(lanes, [&](int i) {
    const Whole value = a[i];
    for (size_t part = 0; part < in.many.size(); ++part)
      w.lanes<Part>(in.many[part])[i] = static_cast<Part>(value >> (8 * sizeof(Part) * part));
  });
  return Outcome::kNext;
}

// ---- exchange between lanes ----

// shfl.sync.mode d, a, b, c, members: the low bits of c are a clamp. The kernels use segments of 32 lanes only.
template <auto source>
Outcome shuffle(Warp& w, const Instruction& in, uint32_t lanes) {
  const uint32_t members = w.lanes<uint32_t>(in.operands[4].at)[std::countr_zero(lanes)];
  if (!w.gathered(members)) return Outcome::kBlocked;
  uint32_t a[kLanes];
  std::memcpy(a, w.lanes<uint32_t>(in.operands[1].at), sizeof a);
  uint32_t* d = w.lanes<uint32_t>(in.operands[0].at);
  const uint32_t* b = w.lanes<uint32_t>(in.operands[2].at);
  each_lane(lanes, [&](int i) {
    const int from = source(i, static_cast<int>(b[i]));
    d[i] = a[from >= 0 && from < kLanes ? from : i];
  });
  return Outcome::kNext;
}

// elect.sync d|p, members: elects the lowest member.
Outcome elect(Warp& w, const Instruction& in, uint32_t lanes) {
  const uint32_t members = w.lanes<uint32_t>(in.operands[2].at)[std::countr_zero(lanes)];
  if (!w.gathered(members)) return Outcome::kBlocked;
  const int leader = std::countr_zero(members & w.alive);
  each_lane(lanes, [&](int i) { w.lanes<uint32_t>(in.operands[0].at)[i] = static_cast<uint32_t>(leader); });
  uint32_t& d = w.predicate(in.operands[1].at);
  d = (d & ~lanes) | (1u << leader & lanes);
  return Outcome::kNext;
}

enum Vote { kAny, kAll, kBallot };
template <Vote vote>
Outcome voted(Warp& w, const Instruction& in, uint32_t lanes) {
  const uint32_t members = w.lanes<uint32_t>(in.operands[2].at)[std::countr_zero(lanes)];
  if (!w.gathered(members)) return Outcome::kBlocked;
  const uint32_t yes = w.predicate(in.operands[1].at) & members & w.alive;
  if (vote == kBallot) {
    each_lane(lanes, [&](int i) { w.lanes<uint32_t>(in.operands[0].at)[i] = yes; });
    return Outcome::kNext;
  }
  const bool result = vote == kAny ? yes != 0 : yes == (members & w.alive);
  uint32_t& d = w.predicate(in.operands[0].at);
  d = (d & ~lanes) | (result ? lanes : 0);
  return Outcome::kNext;
}

// Bitwise operations for registers, and for the lanes of predicates.
constexpr auto both = [](auto a, auto b) { return a & b; };
constexpr auto either = [](auto a, auto b) { return a | b; };
constexpr auto exclusive_or = [](auto a, auto b) { return a ^ b; };

// ---- control ----

Outcome jump(Warp&, const Instruction&, uint32_t) { return Outcome::kJump; }
Outcome end(Warp&, const Instruction&, uint32_t) { return Outcome::kExit; }

template <typename T>
constexpr const char* letter() {
  return sizeof(T) == 2 ? "h" : sizeof(T) == 4 ? "w" : "x";
}

// Letters of operands, in a string that lives as long as the opcode table.
template <typename... T>
const char* letters() {
  static const std::string text = (std::string() + ... + letter<T>());
  return text.c_str();
}

template <typename T>
void add_numbers(Opcodes& to, const std::string& type) {
  constexpr auto plus = [](T a, T b) { return a + b; };
  constexpr auto minus = [](T a, T b) { return a - b; };
  constexpr auto times = [](T a, T b) { return a * b; };
  // The result of a number and NaN is the number.
  constexpr auto least = [](T a, T b) { return a != a ? b : b < a ? b : a; };
  constexpr auto most = [](T a, T b) { return a != a ? b : b > a ? b : a; };
  constexpr auto negative = [](T a) { return -a; };
  const char *two = letters<T, T>(), *three = letters<T, T, T>();
  const std::string low = std::is_floating_point_v<T> ? "" : "lo.";
  to["add." + type] = {three, binary<T, T, T, plus>};
  to["sub." + type] = {three, binary<T, T, T, minus>};
  to["mul." + low + type] = {three, binary<T, T, T, times>};
  to["min." + type] = {three, binary<T, T, T, least>};
  to["max." + type] = {three, binary<T, T, T, most>};
  to["neg." + type] = {two, unary<T, T, negative>};
  constexpr auto eq = [](T a, T b) { return a == b; };
  constexpr auto ne = [](T a, T b) { return a < b || b < a; };
  constexpr auto lt = [](T a, T b) { return a < b; };
  constexpr auto le = [](T a, T b) { return a <= b; };
  constexpr auto gt = [](T a, T b) { return a > b; };
  constexpr auto ge = [](T a, T b) { return a >= b; };
  static const std::string sides = "p" + std::string(letters<T, T>());
  const char* compared = sides.c_str();
  to["setp.eq." + type] = {compared, compare<T, eq>};
  to["setp.ne." + type] = {compared, compare<T, ne>};
  to["setp.lt." + type] = {compared, compare<T, lt>};
  to["setp.le." + type] = {compared, compare<T, le>};
  to["setp.gt." + type] = {compared, compare<T, gt>};
  to["setp.ge." + type] = {compared, compare<T, ge>};
  if constexpr (std::is_floating_point_v<T>) {  // unordered comparisons: true for a NaN operand
    constexpr auto neu = [](T a, T b) { return !(a == b); };
    constexpr auto ltu = [](T a, T b) { return !(a >= b); };
    constexpr auto leu = [](T a, T b) { return !(a > b); };
    constexpr auto gtu = [](T a, T b) { return !(a <= b); };
    constexpr auto geu = [](T a, T b) { return !(a < b); };
    constexpr auto nan = [](T a, T b) { return a != a || b != b; };
    to["setp.neu." + type] = {compared, compare<T, neu>};
    to["setp.ltu." + type] = {compared, compare<T, ltu>};
    to["setp.leu." + type] = {compared, compare<T, leu>};
    to["setp.gtu." + type] = {compared, compare<T, gtu>};
    to["setp.geu." + type] = {compared, compare<T, geu>};
    to["setp.nan." + type] = {compared, compare<T, nan>};
  } else {
    constexpr auto quotient = [](T a, T b) { return b == 0 ? T(-1) : T(a / b); };
    constexpr auto rest = [](T a, T b) { return b == 0 ? a : T(a % b); };
    constexpr auto multiplied = [](T a, T b, T c) { return a * b + c; };
    // C++ does not define shifts by the number of bits or more.
    constexpr auto right = [](T a, uint32_t b) {
      constexpr uint32_t bits = 8 * sizeof(T);
      return b < bits ? T(a >> b) : a < T(0) ? T(-1) : T(0);
    };
    to["div." + type] = {three, binary<T, T, T, quotient>};
    to["rem." + type] = {three, binary<T, T, T, rest>};
    to["mad.lo." + type] = {letters<T, T, T, T>(), ternary<T, T, T, multiplied>};
    to["shr." + type] = {letters<T, T, uint32_t>(), binary<T, T, uint32_t, right>};
  }
}

template <typename Narrow, typename Wide>
void add_products(Opcodes& to, const std::string& type) {
  constexpr auto wide = [](Narrow a, Narrow b) { return Wide(a) * Wide(b); };
  constexpr auto high = [](Narrow a, Narrow b) { return Wide(a) * Wide(b) >> (8 * sizeof(Narrow)); };
  constexpr auto more = [](Narrow a, Narrow b, Wide c) { return Wide(a) * Wide(b) + c; };
  to["mul.wide." + type] = {letters<Wide, Narrow, Narrow>(), binary<Wide, Narrow, Narrow, wide>};
  to["mul.hi." + type] = {letters<Narrow, Narrow, Narrow>(), binary<Narrow, Narrow, Narrow, high>};
  to["mad.wide." + type] = {letters<Wide, Narrow, Narrow, Wide>(), ternary<Wide, Narrow, Wide, more>};
}

template <typename T>
void add_bits(Opcodes& to, const std::string& type) {
  constexpr auto none = [](T a) { return ~a; };
  constexpr auto left = [](T a, uint32_t b) { return b < 8 * sizeof(T) ? T(a << b) : T(0); };
  constexpr auto same = [](T a) { return a; };
  constexpr auto count = [](T a) { return std::popcount(a); };
  constexpr auto zeros = [](T a) { return std::countl_zero(a); };
  const char *two = letters<T, T>(), *three = letters<T, T, T>();
  to["and." + type] = {three, binary<T, T, T, both>};
  to["or." + type] = {three, binary<T, T, T, either>};
  to["xor." + type] = {three, binary<T, T, T, exclusive_or>};
  to["not." + type] = {two, unary<T, T, none>};
  to["shl." + type] = {letters<T, T, uint32_t>(), binary<T, T, uint32_t, left>};
  to["mov." + type] = {two, unary<T, T, same>};
  to["popc." + type] = {letters<uint32_t, T>(), unary<uint32_t, T, count>};
  to["clz." + type] = {letters<uint32_t, T>(), unary<uint32_t, T, zeros>};
  static const std::string selected = std::string(three) + "p";
  to["selp." + type] = {selected.c_str(), select<T>};
}

// Conversion between integers. A register is at least as wide as the type; 8-bit values have registers of 16 bits.
template <typename D, typename A>
void add_conversion(Opcodes& to, const std::string& name) {
  using Register = std::conditional_t<sizeof(A) == 1, uint16_t, A>;
  using Target = std::conditional_t<sizeof(D) == 1, std::conditional_t<std::is_signed_v<D>, int16_t, uint16_t>, D>;
  constexpr auto convert = [](Register a) { return Target(D(A(a))); };
  to["cvt." + name] = {letters<Target, Register>(), unary<Target, Register, convert>};
  if constexpr (sizeof(A) == 1) {
    constexpr auto of_word = [](uint32_t a) { return Target(D(A(a))); };
    to["cvt." + name + " word"] = {letters<Target, uint32_t>(), unary<Target, uint32_t, of_word>};
  }
  if constexpr (sizeof(A) == 4) {
    constexpr auto of_wide = [](uint64_t a) { return Target(D(A(a))); };
    to["cvt." + name + " wide"] = {letters<Target, uint64_t>(), unary<Target, uint64_t, of_wide>};
  }
}

// Calls work<T>(name) for every integer type.
template <typename Work>
void each_integer(Work work) {
  work.template operator()<int8_t>("s8"), work.template operator()<uint8_t>("u8");
  work.template operator()<int16_t>("s16"), work.template operator()<uint16_t>("u16");
  work.template operator()<int32_t>("s32"), work.template operator()<uint32_t>("u32");
  work.template operator()<int64_t>("s64"), work.template operator()<uint64_t>("u64");
}

// Computes work for each half, rounded once: fp32 is exact, or nearly exact, for 16-bit operands.
template <auto from, auto into, typename Work>
uint32_t on_halves(uint32_t a, uint32_t b, uint32_t c, Work work) {
  const auto half_result = [&](int half) {
    return uint32_t{into(work(from(a >> half & 0xFFFF), from(b >> half & 0xFFFF), from(c >> half & 0xFFFF)))} << half;
  };
  return half_result(0) | half_result(16);
}

template <auto from, auto into>
void add_halves(Opcodes& to, const std::string& type) {
  // The first operand becomes the high half.
  constexpr auto two = [](float high, float low) { return uint32_t{into(high)} << 16 | into(low); };
  to["cvt.rn." + type + "x2.f32"] = {"www", binary<uint32_t, float, float, two>};
  to["cvt.rn." + type + ".f32"] = {"hw", unary<uint16_t, float, into>};
  to["cvt.f32." + type] = {"wh", unary<float, uint16_t, from>};
  constexpr auto most_of_two = [](uint32_t a, uint32_t b) {
    uint32_t packed = 0;
    for (const int half : {0, 16}) {  // 0 counts as larger than -0
      const uint16_t left = a >> half, right = b >> half;
      const float x = from(left), y = from(right);
      packed |= uint32_t{x != x || y != y ? into(NAN) : x > y ? left : y > x ? right : uint16_t(left & right)} << half;
    }
    return packed;
  };
  to["max.NaN." + type + "x2"] = {"www", binary<uint32_t, uint32_t, uint32_t, most_of_two>};
  constexpr auto fused = [](uint32_t a, uint32_t b, uint32_t c) {
    return on_halves<from, into>(a, b, c,
                                 [](float x, float y, float z) { return static_cast<float>(double{x} * y + z); });
  };
  constexpr auto sum = [](uint32_t a, uint32_t b) {
    return on_halves<from, into>(a, b, 0, [](float x, float y, float) { return x + y; });
  };
  constexpr auto product = [](uint32_t a, uint32_t b) {
    return on_halves<from, into>(a, b, 0, [](float x, float y, float) { return x * y; });
  };
  to["fma.rn." + type + "x2"] = {"wwww", ternary<uint32_t, uint32_t, uint32_t, fused>};
  to["add." + type + "x2"] = {"www", binary<uint32_t, uint32_t, uint32_t, sum>};
  to["mul." + type + "x2"] = {"www", binary<uint32_t, uint32_t, uint32_t, product>};
}

}  // namespace

void add_arithmetic(Opcodes& to) {
  add_numbers<float>(to, "f32");
  each_integer([&]<typename T>(const std::string& type) {
    if constexpr (sizeof(T) > 1) add_numbers<T>(to, type);
  });
  add_products<int16_t, int32_t>(to, "s16");
  add_products<uint16_t, uint32_t>(to, "u16");
  add_products<int32_t, int64_t>(to, "s32");
  add_products<uint32_t, uint64_t>(to, "u32");
  for (const auto* type : {"b16", "u16"}) add_bits<uint16_t>(to, type);
  for (const auto* type : {"b32", "u32", "f32"}) add_bits<uint32_t>(to, type);
  for (const auto* type : {"b64", "u64"}) add_bits<uint64_t>(to, type);
  for (const auto& [bits, type] : {std::pair{"b16", "u16"}, {"b32", "u32"}, {"b64", "u64"}})
    for (const std::string how : {"eq.", "ne."}) to["setp." + how + bits] = to.at("setp." + how + type);
  constexpr auto none = [](uint32_t a, uint32_t) { return ~a; };
  constexpr auto same = [](uint32_t a, uint32_t) { return a; };
  to["and.pred"] = {"ppp", logic<both>};
  to["or.pred"] = {"ppp", logic<either>};
  to["xor.pred"] = {"ppp", logic<exclusive_or>};
  to["not.pred"] = {"pp", logic<none>};
  to["mov.pred"] = {"pp", logic<same>};
  each_integer([&]<typename A>(const std::string& from) {
    each_integer([&]<typename D>(const std::string& into) { add_conversion<D, A>(to, into + "." + from); });
  });
  add_halves<from_bf16, to_bf16>(to, "bf16");
  add_halves<from_fp16, to_fp16>(to, "f16");
  constexpr auto to_float = [](int32_t a) { return static_cast<float>(a); };
  constexpr auto u_to_float = [](uint32_t a) { return static_cast<float>(a); };
  constexpr auto toward_zero = [](float a) { return static_cast<int32_t>(a); };
  to["cvt.rn.f32.s32"] = {"ww", unary<float, int32_t, to_float>};
  to["cvt.rn.f32.u32"] = {"ww", unary<float, uint32_t, u_to_float>};
  to["cvt.rzi.s32.f32"] = {"ww", unary<int32_t, float, toward_zero>};
  constexpr auto multiplied = [](float a, float b, float c) { return std::fma(a, b, c); };
  constexpr auto exponential = [](float a) { return std::exp2(a); };
  constexpr auto logarithm = [](float a) { return std::log2(a); };
  constexpr auto root = [](float a) { return std::sqrt(a); };
  constexpr auto product_upwards = [](float a, float b) {
    const double exact = double{a} * b;
    const float near = static_cast<float>(exact);
    return near < exact ? std::nextafter(near, std::numeric_limits<float>::infinity()) : near;
  };
  constexpr auto inverse = [](float a) { return 1.0f / a; };
  constexpr auto size = [](float a) { return std::fabs(a); };
  constexpr auto quotient = [](float a, float b) { return a / b; };
  constexpr auto tangent = [](float a) { return std::tanh(a); };
  constexpr auto most = [](float a, float b) { return a != a || b != b ? NAN : std::fmax(a, b); };
  constexpr auto least = [](float a, float b) { return a != a || b != b ? NAN : std::fmin(a, b); };
  to["fma.rn.f32"] = {"wwww", ternary<float, float, float, multiplied>};
  to["ex2.approx.f32"] = {"ww", unary<float, float, exponential>};
  to["lg2.approx.f32"] = {"ww", unary<float, float, logarithm>};
  to["mul.rp.f32"] = {"www", binary<float, float, float, product_upwards>};
  to["sqrt.rn.f32"] = {"ww", unary<float, float, root>};
  to["rcp.approx.f32"] = to["rcp.rn.f32"] = {"ww", unary<float, float, inverse>};
  to["tanh.approx.f32"] = {"ww", unary<float, float, tangent>};
  to["div.rn.f32"] = to["div.full.f32"] = to["div.approx.f32"] = {"www", binary<float, float, float, quotient>};
  to["max.NaN.f32"] = {"www", binary<float, float, float, most>};
  to["min.NaN.f32"] = {"www", binary<float, float, float, least>};
  for (const auto* name : {"mul.rn.f32", "add.rn.f32", "sub.rn.f32"})
    to[name] = to.at(std::string(name).replace(4, 3, ""));
  to["abs.f32"] = {"ww", unary<float, float, size>};
  constexpr auto funnel_left = [](uint32_t low, uint32_t high, uint32_t by) {
    return static_cast<uint32_t>((uint64_t{high} << 32 | low) << (by & 31) >> 32);
  };
  constexpr auto funnel_right = [](uint32_t low, uint32_t high, uint32_t by) {
    return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> (by & 31));
  };
  to["shf.l.wrap.b32"] = {"wwww", ternary<uint32_t, uint32_t, uint32_t, funnel_left>};
  to["shf.r.wrap.b32"] = {"wwww", ternary<uint32_t, uint32_t, uint32_t, funnel_right>};
  constexpr auto bit_mask = [](uint32_t first, uint32_t count) {
    const uint64_t upto = (uint64_t{1} << std::min<uint64_t>(uint64_t{first} + count, 32)) - 1;
    return static_cast<uint32_t>(first < 32 ? upto >> first << first : 0);
  };
  to["bmsk.clamp.b32"] = {"www", binary<uint32_t, uint32_t, uint32_t, bit_mask>};
  constexpr auto permuted = [](uint32_t low, uint32_t high, uint32_t selectors) {
    const uint64_t bytes = uint64_t{high} << 32 | low;
    uint32_t packed = 0;
    for (int i = 0; i < 4; ++i) {
      const uint32_t selector = selectors >> 4 * i & 15, byte = bytes >> 8 * (selector & 7) & 255;
      packed |= (selector < 8 ? byte : byte & 128 ? 255 : 0) << 8 * i;  // selectors of 8 and more take the sign
    }
    return packed;
  };
  constexpr auto relu = [](int32_t a, int32_t b) { return std::max(std::min(a, b), 0); };
  to["min.relu.s32"] = {"www", binary<int32_t, int32_t, int32_t, relu>};
  to["prmt.b32"] = {"wwww", ternary<uint32_t, uint32_t, uint32_t, permuted>};
  to["mov.b32 pack"] = {"wH", pack<uint32_t, uint16_t>};
  to["mov.b32 unpack"] = {"Hw", unpack<uint32_t, uint16_t>};
  to["mov.b64 pack"] = {"xV", pack<uint64_t, uint32_t>};
  to["mov.b64 unpack"] = {"Vx", unpack<uint64_t, uint32_t>};
  to["cvta.param.u64"] = to["cvta.to.global.u64"] = to["cvta.global.u64"] = to["mov.b64"];
  constexpr auto crossed = [](int lane, int b) { return lane ^ b; };
  constexpr auto named = [](int, int b) { return b & 31; };
  constexpr auto above = [](int lane, int b) { return lane + b; };
  constexpr auto below = [](int lane, int b) { return lane - b; };
  to["shfl.sync.bfly.b32"] = {"wwwww", shuffle<crossed>};
  to["shfl.sync.idx.b32"] = {"wwwww", shuffle<named>};
  to["shfl.sync.down.b32"] = {"wwwww", shuffle<above>};
  to["shfl.sync.up.b32"] = {"wwwww", shuffle<below>};
  to["elect.sync"] = {"wpw", elect};
  to["vote.sync.any.pred"] = {"ppw", voted<kAny>};
  to["vote.sync.all.pred"] = {"ppw", voted<kAll>};
  to["vote.sync.ballot.b32"] = {"wpw", voted<kBallot>};
  to["bra"] = {"L", jump};
  to["ret"] = to["exit"] = {"", end};
  to["setmaxnreg.inc.sync.u32"] = to["setmaxnreg.dec.sync.u32"] = {"I", together};
  // Kernels of a stream run one after the previous, so programmatic launches need no action.
  to["griddepcontrol.wait"] = to["griddepcontrol.launch_dependents"] = {"", nothing};
}

}  // namespace interpreter
