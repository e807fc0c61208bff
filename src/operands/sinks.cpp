// Packing of sinks, pages and the LSE gradient for kernels. Window bounds need no packing here, because they are facts
// of a call. A call without sinks or without an LSE gradient passes a tensor without elements.
#include <cstdint>

#include "core/attention_call.h"
#include "core/call_facts.h"
#include "core/values.h"
#include "launch/kernel_args.h"
#include "operands/operands.h"

namespace flashplug {

TensorHandle pack_sink_args(AtenTensorHandle sinks, AtenTensorHandle lse, Arguments* arguments) {
  if (!arguments->takes("sinks")) return {};
  constexpr int64_t no_elements = 0, unit_stride = 1;
  TensorHandle argument = is_defined(sinks) ? TensorHandle::share(sinks) : view(lse, 1, &no_elements, &unit_stride);
  arguments->tensor("sinks", argument.get());
  return argument;
}

TensorHandle pack_dlse(AtenTensorHandle gradient, AtenTensorHandle lse, const CallFacts& p, Arguments* arguments) {
  if (!arguments->takes("dlse")) return {};
  const int64_t empty_size[3] = {p.B, p.Hq, 0}, stride[3] = {p.Hq * p.Sq, p.Sq, 1};
  TensorHandle argument = is_defined(gradient) ? TensorHandle::share(gradient) : view(lse, 3, empty_size, stride);
  arguments->tensor("dlse", argument.get());
  return argument;
}

void pack_page_args(const ForwardCall& call, Arguments* arguments) {
  if (!arguments->takes("block_table")) return;
  arguments->tensor("block_table", call.block_table);
  arguments->tensor("seqused_k", call.seqused_k);
}

}  // namespace flashplug
