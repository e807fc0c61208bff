// Tensor cores: mma.sync, wgmma, and moves of matrices between shared memory and registers. PTX ISA 9, chapters 9.7.14
// and 9.7.15, documents the elements held by each lane.
#include "opcodes.h"

namespace interpreter {

namespace {

// Element types of products. A register holds as many elements as fit.
struct Bf16 {
  using Word = uint16_t;
  static constexpr auto value = from_bf16;
};
struct Fp16 {
  using Word = uint16_t;
  static constexpr auto value = from_fp16;
};
struct E4m3 {
  using Word = uint8_t;
  static constexpr auto value = from_e4m3;
};
struct S8 {  // summed in 32 bits: fp32 represents all integers up to 2^24
  using Word = uint8_t;
  static float value(uint8_t x) { return static_cast<int8_t>(x); }
};

template <typename Number>
constexpr int kPacked = 4 / sizeof(typename Number::Word);  // elements in a register
template <typename Number>
constexpr int kDepth = 8 * kPacked<Number>;  // depth of a product, in elements
template <typename Number>
constexpr int kChunk = 16 / sizeof(typename Number::Word);  // elements in 16 bytes
template <typename Number>
constexpr bool kInWholeNumbers = std::is_same_v<Number, S8>;
constexpr int kRowsOfWarp = 16;  // rows of a warp: part of the 64 rows of wgmma, or all rows of mma.sync
constexpr int kMostColumns = 256;

struct Place {
  int row, column;
};

// Position of element i of a lane's accumulator.
constexpr Place accumulator(int lane, int i) { return {lane / 4 + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2}; }

// Position of a part of register i of a lane's left operand. `parts` is the number of parts in a register.
constexpr Place left(int lane, int i, int part, int parts) {
  return {lane / 4 + i % 2 * 8, (i / 2 * 4 + lane % 4) * parts + part};
}

template <typename Number>
float part_of(uint32_t word, int part) {
  return Number::value(static_cast<typename Number::Word>(word >> 32 / kPacked<Number> * part));
}

uint32_t* many(Warp& w, const Instruction& in, const Operand& vector, int i) {
  return w.lanes<uint32_t>(in.many[static_cast<size_t>(vector.number + i)]);
}

template <typename Number>
void read_left(Warp& w, const Instruction& in, const Operand& vector) {
  auto& a = w.machine().left;
  for (int i = 0; i < 4; ++i) {
    const uint32_t* words = many(w, in, vector, i);
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int part = 0; part < kPacked<Number>; ++part) {
        const Place to = left(lane, i, part, kPacked<Number>);
        a[to.row][to.column] = part_of<Number>(words[lane], part);
      }
    }
  }
}

// Computes d (rows x columns, in the lanes' registers) = left right, plus c if c exists.
template <typename Number>
void multiply(Warp& w, const Instruction& in, int columns, const Operand& d, const Operand* c) {
  const auto& a = w.machine().left;
  const auto& b = w.machine().right;
  auto& sums = w.machine().sums;
  const int registers = columns / 2;
  for (auto& row : sums) std::fill_n(row, columns, 0.0f);
  for (int i = 0; !kInWholeNumbers<Number> && c != nullptr && i < registers; ++i) {
    const uint32_t* words = many(w, in, *c, i);
    for (int lane = 0; lane < kLanes; ++lane) {
      const Place at = accumulator(lane, i);
      sums[at.row][at.column] = std::bit_cast<float>(words[lane]);
    }
  }
  for (int row = 0; row < kRowsOfWarp; ++row)
    for (int k = 0; k < kDepth<Number>; ++k)
      for (int column = 0; column < columns; ++column) sums[row][column] += a[row][k] * b[k][column];
  for (int i = 0; i < registers; ++i) {
    uint32_t* words = many(w, in, d, i);
    for (int lane = 0; lane < kLanes; ++lane) {
      const Place at = accumulator(lane, i);
      const float sum = sums[at.row][at.column];
      // fp32 is exact for the products of a step, but not for the accumulated sum.
      if constexpr (kInWholeNumbers<Number>)
        words[lane] = static_cast<uint32_t>(static_cast<int32_t>(sum)) + (c != nullptr ? words[lane] : 0);
      else
        words[lane] = std::bit_cast<uint32_t>(sum);
    }
  }
}

// ---- mma.sync.m16n8k16.row.col d, a, b, c ----

template <typename Number>
Outcome mma(Warp& w, const Instruction& in, uint32_t) {
  if (!converged(w)) return Outcome::kBlocked;
  auto& b = w.machine().right;
  read_left<Number>(w, in, in.operands[1]);
  for (int i = 0; i < 2; ++i) {
    const uint32_t* words = many(w, in, in.operands[2], i);
    for (int lane = 0; lane < kLanes; ++lane)
      for (int half = 0; half < 2; ++half)
        b[i * 8 + lane % 4 * 2 + half][lane / 4] = part_of<Number>(words[lane], half);
  }
  multiply<Number>(w, in, 8, in.operands[0], &in.operands[3]);
  return Outcome::kNext;
}

// ---- wgmma ----

// A matrix in shared memory by a matrix descriptor: lines of 16 bytes, in groups of 8 lines.
struct Matrix {
  uint64_t start, leading, stride;  // bytes
  int swizzle;                      // bytes of a row: 128, 64, 32; 16 means no swizzle

  explicit Matrix(uint64_t descriptor)
      : start((descriptor & 0x3fff) << 4),
        leading((descriptor >> 16 & 0x3fff) << 4),
        stride((descriptor >> 32 & 0x3fff) << 4),
        swizzle(128 >> (((descriptor >> 62) + 3) % 4)) {
    if ((descriptor >> 49 & 7) != 0) throw Stop("a matrix descriptor with a base offset");
  }

  uint64_t swizzled(uint64_t address) const { return address ^ ((address >> 7 & (swizzle / 16 - 1)) << 4); }

  // Both functions return the address of 16 contiguous bytes. by_depth: of row `index`, from the `chunk`th chunk along
  // k. by_rows, for a matrix with contiguous rows: of k = `index`, from row 8 `chunk`.
  uint64_t by_depth(int index, int chunk) const {
    if (swizzle == 16) return start + index / 8 * stride + index % 8 * 16 + chunk * leading;
    return swizzled(start + index / 8 * stride + index % 8 * swizzle + chunk * 16);
  }
  uint64_t by_rows(int index, int chunk) const {
    const int wide = swizzle / 16;  // chunks in a row
    if (swizzle == 16) return start + chunk * stride + index % 8 * 16 + index / 8 * leading;
    return swizzled(start + chunk / wide * leading + chunk % wide * 16 + index % 8 * swizzle + index / 8 * stride);
  }
};

// Calls put(row, k, element) for `rows` rows from `first`.
template <typename Number, typename Put>
void read_matrix(Cta& cta, const Matrix& matrix, bool rows_contiguous, int first, int rows, Put&& put) {
  constexpr int on_end = kChunk<Number>;
  typename Number::Word line[on_end];
  if (rows_contiguous) {
    for (int k = 0; k < kDepth<Number>; ++k) {
      for (int chunk = first / on_end; chunk < (first + rows) / on_end; ++chunk) {
        std::memcpy(line, cta.to_read_async(matrix.by_rows(k, chunk), sizeof line), sizeof line);
        for (int i = 0; i < on_end; ++i) put(chunk * on_end + i - first, k, Number::value(line[i]));
      }
    }
  } else {
    for (int row = first; row < first + rows; ++row) {
      for (int chunk = 0; chunk < kDepth<Number> / on_end; ++chunk) {
        std::memcpy(line, cta.to_read_async(matrix.by_depth(row, chunk), sizeof line), sizeof line);
        for (int i = 0; i < on_end; ++i) put(row - first, chunk * on_end + i, Number::value(line[i]));
      }
    }
  }
}

// The rows of a warp in wgmma d, a, b, scale-d, (imm-scale-a, imm-scale-b,) (imm-trans-a,) (imm-trans-b). Integers have
// no scales, and only 16-bit operands can be transposed.
template <typename Number, bool in_registers>
Outcome wgmma(Warp& w, const Instruction& in, uint32_t lanes) {
  if (!converged(w)) return Outcome::kBlocked;
  const int lane = std::countr_zero(lanes);
  const uint64_t left_word = in_registers ? 0 : w.lanes<uint64_t>(in.operands[1].at)[lane];
  const uint64_t right_word = w.lanes<uint64_t>(in.operands[2].at)[lane];
  const bool accumulates = (w.predicate(in.operands[3].at) >> lane & 1) != 0;
  if (!kInWholeNumbers<Number> && (in.operands[4].number != 1 || in.operands[5].number != 1))
    throw Stop("wgmma that negates");
  w.machine().later(w.products, [&w, &in, left_word, right_word, accumulates] {
    auto& a = w.machine().left;
    auto& b = w.machine().right;
    const auto comes_transposed = [&in](size_t operand) {
      return sizeof(typename Number::Word) == 2 && in.operands[operand].number != 0;
    };
    const int columns = in.extra, first = w.index % 4 * kRowsOfWarp;
    if constexpr (in_registers) {
      read_left<Number>(w, in, in.operands[1]);
    } else {
      read_matrix<Number>(*w.cta, Matrix(left_word), comes_transposed(6), first, kRowsOfWarp,
                          [&](int row, int k, float x) { a[row][k] = x; });
    }
    read_matrix<Number>(*w.cta, Matrix(right_word), comes_transposed(in_registers ? 6 : 7), 0, columns,
                        [&](int column, int k, float x) { b[k][column] = x; });
    multiply<Number>(w, in, columns, in.operands[0], accumulates ? &in.operands[0] : nullptr);
  });
  return Outcome::kNext;
}

Outcome commit_products(Warp& w, const Instruction&, uint32_t) {
  if (!converged(w)) return Outcome::kBlocked;
  w.products.commit();
  return Outcome::kNext;
}

Outcome wait_products(Warp& w, const Instruction& in, uint32_t) {
  if (!converged(w)) return Outcome::kBlocked;
  w.products.wait(static_cast<int>(in.operands[0].number));
  return Outcome::kNext;
}

// ---- moves: matrices of 8 x 8 16-bit elements; lane 8 m + l holds the start of line l of matrix m ----

template <bool transposed>
constexpr std::pair<int, int> line_and_column(int lane, int half) {
  const int across = lane / 4, along = lane % 4 * 2 + half;
  return transposed ? std::pair{along, across} : std::pair{across, along};
}

template <bool transposed, bool loads>
Outcome move_matrices(Warp& w, const Instruction& in, uint32_t) {
  if (!converged(w)) return Outcome::kBlocked;
  const Operand& address = in.operands[loads ? 1 : 0];
  const uint32_t* lines = w.lanes<uint32_t>(address.at);
  for (size_t matrix = 0; matrix < in.many.size(); ++matrix) {
    std::byte* at[8];
    for (size_t line = 0; line < 8; ++line) {
      const uint32_t offset = lines[matrix * 8 + line] + static_cast<uint32_t>(address.number);
      if (offset % 16 != 0) throw Stop("a line of a matrix that is not aligned to 16 bytes");
      at[line] = loads ? w.cta->at(offset, 16) : w.cta->to_store(offset, 16, w);
    }
    uint32_t* words = w.lanes<uint32_t>(in.many[matrix]);
    uint32_t elements[kLanes] = {};
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int half = 0; half < 2; ++half) {
        const auto [line, column] = line_and_column<transposed>(lane, half);
        uint16_t element = static_cast<uint16_t>(words[lane] >> 16 * half);
        if (loads)
          std::memcpy(&element, at[line] + column * 2, 2);
        else
          std::memcpy(at[line] + column * 2, &element, 2);
        elements[lane] |= uint32_t{element} << 16 * half;
      }
    }
    if (loads) std::memcpy(words, elements, sizeof elements);
  }
  return Outcome::kNext;
}

// types: type of the sums, then types of the operands.
template <typename Number>
void add_products(Opcodes& to, const std::string& types, const char* of_matrices, const char* of_registers) {
  for (int columns = 8; columns <= kMostColumns; columns += 8) {
    const auto sizes = "m64n" + std::to_string(columns) + "k" + std::to_string(kDepth<Number>);
    const auto name = "wgmma.mma_async.sync." + sizes + "." + types;
    to[name] = {of_matrices, wgmma<Number, false>, columns};
    to[name + " registers"] = {of_registers, wgmma<Number, true>, columns};
  }
}

}  // namespace

void add_matrices(Opcodes& to) {
  to["mma.sync.m16n8k16.row.col.f32.bf16.bf16.f32"] = {"VVVV", mma<Bf16>};
  to["mma.sync.m16n8k16.row.col.f32.f16.f16.f32"] = {"VVVV", mma<Fp16>};
  add_products<Bf16>(to, "f32.bf16.bf16", "VxxpIIII", "VVxpIII");
  add_products<Fp16>(to, "f32.f16.f16", "VxxpIIII", "VVxpIII");
  add_products<E4m3>(to, "f32.e4m3.e4m3", "VxxpII", "VVxpII");
  add_products<S8>(to, "satfinite.s32.s8.s8", "Vxxp", "VVxp");
  to["wgmma.fence.sync"] = {"", together};
  to["wgmma.commit_group.sync"] = {"", commit_products};
  to["wgmma.wait_group.sync"] = {"I", wait_products};
  for (const std::string size : {"x1", "x2", "x4"}) {
    to["ldmatrix.sync.m8n8." + size + ".shared.b16"] = {"VS", move_matrices<false, true>};
    to["ldmatrix.sync.m8n8." + size + ".trans.shared.b16"] = {"VS", move_matrices<true, true>};
    to["stmatrix.sync.m8n8." + size + ".shared.b16"] = {"SV", move_matrices<false, false>};
    to["stmatrix.sync.m8n8." + size + ".trans.shared.b16"] = {"SV", move_matrices<true, false>};
  }
}

}  // namespace interpreter
