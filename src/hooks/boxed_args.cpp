// Arguments by name, on stacks of the stable ABI.
#include "hooks/boxed_args.h"

#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "core/values.h"

namespace flashplug {

namespace {

struct Named {
  const char* name;
  Arg arg;
};
constexpr Named kNames[] = {{"grad_out", Arg::kGradOut},
                            {"grad_out_", Arg::kGradOut},
                            {"out", Arg::kOut},
                            {"query", Arg::kQuery},
                            {"key", Arg::kKey},
                            {"value", Arg::kValue},
                            {"lse", Arg::kLse},
                            {"logsumexp", Arg::kLse},
                            {"cu_seq_q", Arg::kCuSeqlensQ},
                            {"cum_seq_q", Arg::kCuSeqlensQ},
                            {"cu_seqlens_q", Arg::kCuSeqlensQ},
                            {"cu_seq_k", Arg::kCuSeqlensK},
                            {"cum_seq_k", Arg::kCuSeqlensK},
                            {"cu_seqlens_k", Arg::kCuSeqlensK},
                            {"max_q", Arg::kMaxQ},
                            {"max_k", Arg::kMaxK},
                            {"max_seqlen_q", Arg::kMaxQ},
                            {"max_seqlen_k", Arg::kMaxK},
                            {"dropout_p", Arg::kDropout},
                            {"is_causal", Arg::kCausal},
                            {"return_debug_mask", Arg::kDebugMask},
                            {"rng_state", Arg::kRng},
                            {"unused", Arg::kUnused},
                            {"scale", Arg::kScale},
                            {"window_size", Arg::kWindow},
                            {"window_size_left", Arg::kLeft},
                            {"window_size_right", Arg::kRight},
                            {"seqused_k", Arg::kSeqUsedK},
                            {"seqlen_k", Arg::kSeqUsedK},
                            {"alibi_slopes", Arg::kAlibi},
                            {"block_table", Arg::kBlockTable},
                            {"num_splits", Arg::kSplits},
                            {"num_splits_key", Arg::kSplits},
                            {"enable_gqa", Arg::kGrouped},
                            {"backend", Arg::kBackend},
                            {"bias", Arg::kBias},
                            {"custom_mask_type", Arg::kMaskType},
                            {"compute_log_sumexp", Arg::kNeedsLse},
                            {"philox_seed", Arg::kSeed},
                            {"philox_offset", Arg::kOffset},
                            {"bias_requires_grad", Arg::kBiasGrad},
                            {"shared_storage_dqdkdv", Arg::kOneStorage}};

template <typename T>
T as(StableIValue value) {
  return torch::stable::detail::to<T>(value);
}

}  // namespace

LiveSchema::Boxing LiveSchema::boxed_type(std::string_view type) {
  const bool maybe = type.ends_with('?'), list = type.find('[') != type.npos;
  const bool tensor = type.starts_with("Tensor");
  if (list && (tensor || !maybe))
    throw std::runtime_error("torch_flashplug: an argument of torch's op must not be a list of type " +
                             std::string(type));
  if (!maybe) return tensor ? Boxing::kTensor : Boxing::kPlain;
  return list ? Boxing::kMaybeList : tensor ? Boxing::kMaybeTensor : Boxing::kMaybeNumber;
}

LiveSchema::LiveSchema(std::string_view schema) {
  positions_.fill(-1);
  const size_t begin = schema.find('(') + 1;
  std::string_view list = schema.substr(begin, schema.find(") -> ") - begin);
  while (!list.empty()) {
    const size_t comma = list.find(", ");
    const std::string_view item = list.substr(0, comma);
    list = comma == list.npos ? std::string_view() : list.substr(comma + 2);
    if (item == "*") continue;
    if (count_ == kMaxArguments)
      throw std::runtime_error(
          "torch_flashplug: torch's op must have at most LiveSchema::kMaxArguments arguments, but has more.");
    const size_t space = item.rfind(' ');
    const std::string_view name = item.substr(space + 1, item.find('=', space) - space - 1);
    const auto entry =
        std::find_if(std::begin(kNames), std::end(kNames), [&](const Named& x) { return x.name == name; });
    const std::string_view type = item.substr(0, space);
    const size_t equals = item.find('=', space);
    if (entry != std::end(kNames))
      positions_[static_cast<int>(entry->arg)] = count_;
    else
      unknown_.push_back(unknown(count_, type, equals == item.npos ? "" : item.substr(equals + 1)));
    boxing_[count_++] = boxed_type(type);
  }
}

LiveSchema::Unknown LiveSchema::unknown(int position, std::string_view type, std::string_view default_text) {
  using Default = Unknown::Default;
  if (default_text.empty()) return {position};
  if (type.ends_with('?')) return {position, default_text == "None" ? Default::kNone : Default::kOther};
  if (type == "bool") return {position, Default::kFlag, default_text == "True" ? 1.0 : 0.0};
  const double number = std::strtod(std::string(default_text).c_str(), nullptr);
  if (type == "int" || type == "SymInt") return {position, Default::kInteger, number};
  return type == "float" ? Unknown{position, Default::kReal, number} : Unknown{position};
}

bool LiveSchema::has_unknown_value(const StableIValue* arguments) const {
  return std::ranges::any_of(unknown_, [arguments](const Unknown& x) {
    const StableIValue value = arguments[x.position];
    switch (x.form) {
      case Unknown::Default::kNone:
        return as<StableIValue*>(value) != nullptr;
      case Unknown::Default::kFlag:
        return as<bool>(value) != (x.value != 0.0);
      case Unknown::Default::kInteger:
        return static_cast<double>(as<int64_t>(value)) != x.value;
      case Unknown::Default::kReal:
        return as<double>(value) != x.value;
      case Unknown::Default::kOther:
        break;
    }
    return true;
  });
}

void LiveSchema::free(const StableIValue* arguments) const {
  for (int i = 0; i < count_; ++i) {
    if (boxing_[i] == Boxing::kPlain) continue;
    if (boxing_[i] == Boxing::kTensor) {
      aoti_torch_delete_tensor_object(as<AtenTensorHandle>(arguments[i]));
      continue;
    }
    StableIValue* cell = as<StableIValue*>(arguments[i]);
    if (cell == nullptr) continue;
    if (boxing_[i] == Boxing::kMaybeTensor) aoti_torch_delete_tensor_object(as<AtenTensorHandle>(*cell));
    if (boxing_[i] == Boxing::kMaybeList) torch_delete_list(as<StableListHandle>(*cell));
    delete cell;
  }
}

BoxedArgs::BoxedArgs(const LiveSchema& signature, StableIValue* stack, uint64_t count)
    : signature_(signature), stack_(stack) {
  if (count != static_cast<uint64_t>(signature.count()))
    throw std::runtime_error(
        "torch_flashplug: torch's op must be called with the arguments of the schema, but got another number.");
  std::copy_n(stack, count, args_.begin());
}

const StableIValue* BoxedArgs::at(Arg arg) const {
  const int position = signature_.position(arg);
  if (position < 0) return nullptr;
  return signature_.is_optional(position) ? as<StableIValue*>(args_[position]) : &args_[position];
}

AtenTensorHandle BoxedArgs::undefined(Arg arg) const {
  const StableIValue* value = at(arg);
  return value == nullptr ? nullptr : as<AtenTensorHandle>(*value);
}

AtenTensorHandle BoxedArgs::tensor(Arg arg) const {
  const AtenTensorHandle handle = undefined(arg);
  bool defined = false;
  return handle != nullptr && aoti_torch_is_defined(handle, &defined) == 0 && defined ? handle : nullptr;
}

std::optional<double> BoxedArgs::real(Arg arg) const {
  const StableIValue* value = at(arg);
  return value == nullptr ? std::nullopt : std::optional<double>(as<double>(*value));
}

bool BoxedArgs::flag(Arg arg) const {
  const StableIValue* value = at(arg);
  return value != nullptr && as<bool>(*value);
}

std::optional<int64_t> BoxedArgs::integer(Arg arg) const {
  const StableIValue* value = at(arg);
  return value == nullptr ? std::nullopt : std::optional<int64_t>(as<int64_t>(*value));
}

std::optional<std::array<int64_t, 2>> BoxedArgs::pair(Arg arg) const {
  const StableIValue* value = at(arg);
  size_t size = 0;
  if (value == nullptr || torch_list_size(as<StableListHandle>(*value), &size) != 0 || size != 2) return std::nullopt;
  std::array<int64_t, 2> numbers;
  for (size_t i = 0; i < 2; ++i) {
    StableIValue item = 0;
    check_shim(torch_list_get_item(as<StableListHandle>(*value), i, &item), "list_get_item");
    numbers[i] = as<int64_t>(item);
  }
  return numbers;
}

void BoxedArgs::call_stock_op(const char* op) {
  passed_on_ = true;
  if (!dispatch_op(op, "", stack_)) rethrow(op);
}

}  // namespace flashplug
