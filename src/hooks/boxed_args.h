// Calls of ops whose schemas are not the same in every torch: their arguments are found by name, and read where they
// lie, since the call may go on to another kernel as it is.
#pragma once

#include <array>
#include <optional>
#include <string_view>

#include "core/values.h"

namespace flashplug {

// What torch's ops of attention on end take. Several names are one argument's.
enum class Arg : int {
  kGradOut,
  kOut,
  kQuery,
  kKey,
  kValue,
  kLse,
  kCuQ,
  kCuK,
  kMaxQ,
  kMaxK,
  kDropout,
  kCausal,
  kDebugMask,
  kRng,
  kUnused,
  kScale,
  kWindow,
  kLeft,
  kRight,
  kUsedK,
  kAlibi,
  kPages,
  kSplits,
  kGrouped,
  kBackend,
  kBias,
  kMaskType,
  kNeedsLse,
  kSeed,
  kOffset,
  kBiasGrad,
  kOneStorage,
  kCount
};

// Of an op, as torch prints its schema.
class LiveSchema {
 public:
  static constexpr int kMost = 32;  // arguments
  explicit LiveSchema(std::string_view schema);
  int place(Arg arg) const { return place_[static_cast<int>(arg)]; }  // -1: this torch's op has no such argument
  int count() const { return count_; }
  void free(const StableIValue* arguments) const;
  bool is_optional(int place) const { return boxing_[place] != Boxing::kPlain && boxing_[place] != Boxing::kTensor; }

 private:
  enum class Boxing : uint8_t { kPlain, kTensor, kMaybeTensor, kMaybeNumber, kMaybeList };
  static Boxing boxing_of(std::string_view type);

  int count_ = 0;
  std::array<int, static_cast<size_t>(Arg::kCount)> place_;
  std::array<Boxing, kMost> boxing_{};
};

// The arguments of one call, freed in the end unless another kernel got them. What is returned is borrowed. Results may
// be put on the stack at any time.
class Boxed {
 public:
  Boxed(const LiveSchema& signature, StableIValue* stack, uint64_t count);
  Boxed(const Boxed&) = delete;
  ~Boxed() {
    if (!given_away_) signature_.free(given_.data());
  }
  bool has(Arg arg) const { return at(arg) != nullptr; }  // and it is not None
  AtenTensorHandle tensor(Arg arg) const;                 // null: there is none
  AtenTensorHandle undefined(Arg arg) const;              // likewise, but for undefined ones
  std::optional<double> real(Arg arg) const;
  std::optional<int64_t> integer(Arg arg) const;
  bool flag(Arg arg) const;                                   // false where this torch's op has none
  std::optional<std::array<int64_t, 2>> pair(Arg arg) const;  // of a list of two
  // To an op of the same arguments, whose results are on the stack then.
  void go_on_to(const char* op);

 private:
  const StableIValue* at(Arg arg) const;  // null: none, or None

  const LiveSchema& signature_;
  StableIValue* stack_;
  std::array<StableIValue, LiveSchema::kMost> given_;
  bool given_away_ = false;
};

}  // namespace flashplug
