// Seeds of dropout. The seed comes from the default generator, as in stock's kernels, so that manual_seed, checkpoints
// and replays of graphs hold. Kernels make the dropout bits in registers (kernels/score_stages/dropout.py). The
// reference math makes the same bits (dropout_reference.py), so any backward can follow any forward.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>

#include <cstdint>
#include <optional>
#include <stdexcept>

#include "core/call_facts.h"
#include "core/schemas.h"
#include "core/values.h"
#include "launch/kernel_args.h"
#include "operands/operands.h"

namespace flashplug {

DropoutSeed draw_seed(const TensorMeta& query) {
  const auto number = [&query] {
    return empty_strided(0, nullptr, nullptr, aoti_torch_dtype_int64(), query.device_type, query.device_index);
  };
  OpCall random(kRandom);
  random[kRandom["self"]] = box::from_tensor(number());
  random[kRandom["generator"]] = box::from(std::nullopt);
  random.run();
  DropoutSeed drawn{random.result(0), number()};
  // Each call has a seed of its own, so the offset is 0.
  check_shim(aoti_torch_aten_fill__Scalar(drawn.offset.get(), 0.0), "fill_");
  return drawn;
}

TensorHandle pack_dropout_args(AtenTensorHandle seed, const TensorMeta& query, Arguments* arguments) {
  if (!arguments->takes("seed")) return {};
  int64_t numbers = 0;
  int32_t dtype = -1, device_type = -1, device_index = -1;
  const bool read = is_defined(seed) && aoti_torch_get_numel(seed, &numbers) == 0 &&
                    aoti_torch_get_dtype(seed, &dtype) == 0 && aoti_torch_get_device_type(seed, &device_type) == 0 &&
                    aoti_torch_get_device_index(seed, &device_index) == 0;
  const bool beside = device_type == query.device_type && device_index == query.device_index;
  if (!read || numbers != 1 || dtype != aoti_torch_dtype_int64() || !beside)
    throw std::runtime_error(
        "torch_flashplug: seed must be a single int64 on the device of query. Pass the seed of the forward.");
  constexpr int64_t single = 1;
  TensorHandle seed_view = view(seed, 1, &single, &single);
  arguments->tensor("seed", seed_view.get());
  return seed_view;
}

}  // namespace flashplug
