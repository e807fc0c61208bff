// Boxed arguments of ops whose schemas differ between torch versions. Arguments are found by name and read in place,
// because the call may go on to a different kernel unchanged.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "core/values.h"

namespace flashplug {

// Arguments of torch's ops for packed sequences. Several names may mean the same argument.
enum class Arg : int {
  kGradOut,
  kOut,
  kQuery,
  kKey,
  kValue,
  kLse,
  kCuSeqlensQ,
  kCuSeqlensK,
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
  kSeqUsedK,
  kAlibi,
  kBlockTable,
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

// Schema of an op, parsed from the text printed by the running torch.
class LiveSchema {
 public:
  static constexpr int kMaxArguments = 32;  // maximal number of arguments
  explicit LiveSchema(std::string_view schema);
  int position(Arg arg) const {
    return positions_[static_cast<int>(arg)];
  }  // -1: the running torch's op has no such argument
  int count() const { return count_; }
  void free(const StableIValue* arguments) const;
  bool is_optional(int position) const {
    return boxing_[position] != Boxing::kPlain && boxing_[position] != Boxing::kTensor;
  }
  // Return true if an argument without an `Arg` differs from its default in the schema. A newer torch may have such
  // arguments. An argument without a default counts as different.
  bool has_unknown_value(const StableIValue* arguments) const;

 private:
  enum class Boxing : uint8_t { kPlain, kTensor, kMaybeTensor, kMaybeNumber, kMaybeList };
  static Boxing boxed_type(std::string_view type);
  // An argument without an `Arg`, and how a default is recognized in a call.
  struct Unknown {
    enum class Default : uint8_t { kNone, kFlag, kInteger, kReal, kOther };
    int position;
    Default form = Default::kOther;
    double value = 0;
  };
  static Unknown unknown(int position, std::string_view type, std::string_view default_text);

  int count_ = 0;
  std::array<int, static_cast<size_t>(Arg::kCount)> positions_;
  std::array<Boxing, kMaxArguments> boxing_{};
  std::vector<Unknown> unknown_;
};

// The arguments of a call. The destructor frees the arguments, unless a different kernel received them. Returned
// tensors are borrowed. Results may be put on the stack at any time.
class BoxedArgs {
 public:
  BoxedArgs(const LiveSchema& signature, StableIValue* stack, uint64_t count);
  BoxedArgs(const BoxedArgs&) = delete;
  ~BoxedArgs() {
    if (!passed_on_) signature_.free(args_.data());
  }
  bool has(Arg arg) const { return at(arg) != nullptr; }  // present and not None
  bool has_unknown_value() const { return signature_.has_unknown_value(args_.data()); }
  AtenTensorHandle tensor(Arg arg) const;     // null: absent
  AtenTensorHandle undefined(Arg arg) const;  // null: absent; may return an undefined tensor
  std::optional<double> real(Arg arg) const;
  std::optional<int64_t> integer(Arg arg) const;
  bool flag(Arg arg) const;                                   // false if the running torch's op has no such flag
  std::optional<std::array<int64_t, 2>> pair(Arg arg) const;  // from a list of two numbers
  // Pass the arguments on to an op with the same schema. The results are on the stack afterwards.
  void call_stock_op(const char* op);

 private:
  const StableIValue* at(Arg arg) const;  // null: absent, or None

  const LiveSchema& signature_;
  StableIValue* stack_;
  std::array<StableIValue, LiveSchema::kMaxArguments> args_;
  bool passed_on_ = false;
};

}  // namespace flashplug
