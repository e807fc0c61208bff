// Tensor cores: mma.sync, wgmma, and moves of matrices between shared memory and registers. Which lane holds what: PTX
// ISA 9, chapters 9.7.14 and 9.7.15.
#include "opcodes.h"

namespace interpreter {

namespace {

constexpr int kDepth = 16;       // of a product, in elements of 16 bits
constexpr int kRowsOfWarp = 16;  // of a product's 64, or all of mma.sync's
constexpr int kMostColumns = 256;

struct Place {
  int row, column;
};

// Of element i of a lane's accumulator.
constexpr Place accumulator(int lane, int i) { return {lane / 4 + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2}; }

// Of one half of register i of a lane's left operand.
constexpr Place left(int lane, int i, int half) { return {lane / 4 + i % 2 * 8, i / 2 * 8 + lane % 4 * 2 + half}; }

using Left = float[kRowsOfWarp][kDepth];

uint32_t* many(Warp& w, const Instruction& in, const Operand& vector, int i) {
  return w.lanes<uint32_t>(in.many[static_cast<size_t>(vector.number + i)]);
}

template <auto from>
void read_left(Warp& w, const Instruction& in, const Operand& vector, Left& a) {
  for (int i = 0; i < 4; ++i) {
    const uint32_t* words = many(w, in, vector, i);
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int half = 0; half < 2; ++half) {
        const Place to = left(lane, i, half);
        a[to.row][to.column] = from(static_cast<uint16_t>(words[lane] >> 16 * half));
      }
    }
  }
}

// d (rows x columns, in the lanes' registers) = left right, plus c where there is one.
void multiply(Warp& w, const Instruction& in, int columns, const Operand& d, const Operand* c) {
  const auto& a = w.machine().left;
  const auto& b = w.machine().right;
  auto& sums = w.machine().sums;
  const int registers = columns / 2;
  for (auto& row : sums) std::fill_n(row, columns, 0.0f);
  for (int i = 0; c != nullptr && i < registers; ++i) {
    const uint32_t* words = many(w, in, *c, i);
    for (int lane = 0; lane < kLanes; ++lane) {
      const Place at = accumulator(lane, i);
      sums[at.row][at.column] = std::bit_cast<float>(words[lane]);
    }
  }
  for (int row = 0; row < kRowsOfWarp; ++row)
    for (int k = 0; k < kDepth; ++k)
      for (int column = 0; column < columns; ++column) sums[row][column] += a[row][k] * b[k][column];
  for (int i = 0; i < registers; ++i) {
    uint32_t* words = many(w, in, d, i);
    for (int lane = 0; lane < kLanes; ++lane) {
      const Place at = accumulator(lane, i);
      words[lane] = std::bit_cast<uint32_t>(sums[at.row][at.column]);
    }
  }
}

// ---- mma.sync.m16n8k16.row.col d, a, b, c ----

template <auto from>
Outcome mma(Warp& w, const Instruction& in, uint32_t) {
  if (!whole(w)) return Outcome::kBlocked;
  auto& b = w.machine().right;
  read_left<from>(w, in, in.operands[1], w.machine().left);
  for (int i = 0; i < 2; ++i) {
    const uint32_t* words = many(w, in, in.operands[2], i);
    for (int lane = 0; lane < kLanes; ++lane)
      for (int half = 0; half < 2; ++half)
        b[i * 8 + lane % 4 * 2 + half][lane / 4] = from(static_cast<uint16_t>(words[lane] >> 16 * half));
  }
  multiply(w, in, 8, in.operands[0], &in.operands[3]);
  return Outcome::kNext;
}

// ---- wgmma ----

// A matrix in shared memory, as a matrix descriptor says it: lines of 16 bytes, in groups of 8 lines.
struct Matrix {
  uint64_t start, leading, stride;  // bytes
  int swizzle;                      // bytes of a row: 128, 64, 32; 16: none

  explicit Matrix(uint64_t descriptor)
      : start((descriptor & 0x3fff) << 4),
        leading((descriptor >> 16 & 0x3fff) << 4),
        stride((descriptor >> 32 & 0x3fff) << 4),
        swizzle(128 >> (((descriptor >> 62) + 3) % 4)) {
    if ((descriptor >> 49 & 7) != 0) throw Stop("a matrix descriptor with a base offset");
  }

  uint64_t swizzled(uint64_t address) const { return address ^ ((address >> 7 & (swizzle / 16 - 1)) << 4); }

  // Eight elements on end: of row `index` from k = 8 `chunk`; or, where the other dim is the contiguous one, of k =
  // `index` from row 8 `chunk`.
  uint64_t by_depth(int index, int chunk) const {
    if (swizzle == 16) return start + index / 8 * stride + index % 8 * 16 + chunk * leading;
    return swizzled(start + index / 8 * stride + index % 8 * swizzle + chunk * 16);
  }
  uint64_t by_rows(int index, int chunk) const {
    const int wide = swizzle / 16;  // chunks of a row
    if (swizzle == 16) return start + chunk * stride + index % 8 * 16 + index / 8 * leading;
    return swizzled(start + chunk / wide * leading + chunk % wide * 16 + index % 8 * swizzle + index / 8 * stride);
  }
};

// put(row, k, element) for `rows` rows from `first`.
template <auto from, typename Put>
void read_matrix(Cta& cta, const Matrix& matrix, bool rows_contiguous, int first, int rows, Put&& put) {
  uint16_t line[8];
  if (rows_contiguous) {
    for (int k = 0; k < kDepth; ++k) {
      for (int chunk = first / 8; chunk < (first + rows) / 8; ++chunk) {
        std::memcpy(line, cta.to_read_async(matrix.by_rows(k, chunk), sizeof line), sizeof line);
        for (int i = 0; i < 8; ++i) put(chunk * 8 + i - first, k, from(line[i]));
      }
    }
  } else {
    for (int row = first; row < first + rows; ++row) {
      for (int chunk = 0; chunk < kDepth / 8; ++chunk) {
        std::memcpy(line, cta.to_read_async(matrix.by_depth(row, chunk), sizeof line), sizeof line);
        for (int i = 0; i < 8; ++i) put(row - first, chunk * 8 + i, from(line[i]));
      }
    }
  }
}

// A warp's rows of wgmma d, a, b, scale-d, imm-scale-a, imm-scale-b, (imm-trans-a,) imm-trans-b.
template <auto from, bool in_registers>
Outcome wgmma(Warp& w, const Instruction& in, uint32_t lanes) {
  if (!whole(w)) return Outcome::kBlocked;
  const int lane = std::countr_zero(lanes);
  const uint64_t left_word = in_registers ? 0 : w.lanes<uint64_t>(in.operands[1].at)[lane];
  const uint64_t right_word = w.lanes<uint64_t>(in.operands[2].at)[lane];
  const bool accumulates = (w.predicate(in.operands[3].at) >> lane & 1) != 0;
  if (in.operands[4].number != 1 || in.operands[5].number != 1) throw Stop("wgmma that negates");
  w.machine().later(w.products, [&w, &in, left_word, right_word, accumulates] {
    auto& a = w.machine().left;
    auto& b = w.machine().right;
    const int columns = in.extra, first = w.index % 4 * kRowsOfWarp;
    if constexpr (in_registers) {
      read_left<from>(w, in, in.operands[1], a);
    } else {
      read_matrix<from>(*w.cta, Matrix(left_word), in.operands[6].number != 0, first, kRowsOfWarp,
                        [&](int row, int k, float x) { a[row][k] = x; });
    }
    read_matrix<from>(*w.cta, Matrix(right_word), in.operands[in_registers ? 6 : 7].number != 0, 0, columns,
                      [&](int column, int k, float x) { b[k][column] = x; });
    multiply(w, in, columns, in.operands[0], accumulates ? &in.operands[0] : nullptr);
  });
  return Outcome::kNext;
}

Outcome commit_products(Warp& w, const Instruction&, uint32_t) {
  if (!whole(w)) return Outcome::kBlocked;
  w.products.commit();
  return Outcome::kNext;
}

Outcome wait_products(Warp& w, const Instruction& in, uint32_t) {
  if (!whole(w)) return Outcome::kBlocked;
  w.products.wait(static_cast<int>(in.operands[0].number));
  return Outcome::kNext;
}

// ---- moves: matrices of 8 x 8 halves; lane 8 m + l says where line l of matrix m begins ----

template <bool transposed>
constexpr std::pair<int, int> line_and_column(int lane, int half) {
  const int across = lane / 4, along = lane % 4 * 2 + half;
  return transposed ? std::pair{along, across} : std::pair{across, along};
}

template <bool transposed, bool loads>
Outcome move_matrices(Warp& w, const Instruction& in, uint32_t) {
  if (!whole(w)) return Outcome::kBlocked;
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
    uint32_t made[kLanes] = {};
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int half = 0; half < 2; ++half) {
        const auto [line, column] = line_and_column<transposed>(lane, half);
        uint16_t element = static_cast<uint16_t>(words[lane] >> 16 * half);
        if (loads)
          std::memcpy(&element, at[line] + column * 2, 2);
        else
          std::memcpy(at[line] + column * 2, &element, 2);
        made[lane] |= uint32_t{element} << 16 * half;
      }
    }
    if (loads) std::memcpy(words, made, sizeof made);
  }
  return Outcome::kNext;
}

template <auto from>
void add_products(Opcodes& to, const std::string& type) {
  to["mma.sync.m16n8k16.row.col.f32." + type + "." + type + ".f32"] = {"VVVV", mma<from>};
  for (int columns = 8; columns <= kMostColumns; columns += 8) {
    const auto name = "wgmma.mma_async.sync.m64n" + std::to_string(columns) + "k16.f32." + type + "." + type;
    to[name] = {"VxxpIIII", wgmma<from, false>, columns};
    to[name + " registers"] = {"VVxpIII", wgmma<from, true>, columns};
  }
}

}  // namespace

void add_matrices(Opcodes& to) {
  add_products<from_bf16>(to, "bf16");
  add_products<from_fp16>(to, "f16");
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
