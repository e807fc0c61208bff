// Packing of sinks, pages and the LSE gradient for kernels. Window bounds need no packing here, because they are facts
// of a call. A call without sinks or without an LSE gradient passes a tensor without elements.
#include "launch/kernel_args.h"
#include "ops/attention.h"

namespace flashplug {

Owned give_sinks(AtenTensorHandle sinks, AtenTensorHandle lse, Arguments* arguments) {
  if (!arguments->takes("sinks")) return {};
  constexpr int64_t none = 0, one = 1;
  Owned given = is_there(sinks) ? Owned::share(sinks) : view(lse, 1, &none, &one);
  arguments->tensor("sinks", given.get());
  return given;
}

Owned give_lse_gradient(AtenTensorHandle gradient, AtenTensorHandle lse, const Problem& p, Arguments* arguments) {
  if (!arguments->takes("dlse")) return {};
  const int64_t none[3] = {p.B, p.Hq, 0}, stride[3] = {p.Hq * p.Sq, p.Sq, 1};
  Owned given = is_there(gradient) ? Owned::share(gradient) : view(lse, 3, none, stride);
  arguments->tensor("dlse", given.get());
  return given;
}

void give_pages(const ForwardCall& call, Arguments* arguments) {
  if (!arguments->takes("pages")) return;
  arguments->tensor("pages", call.pages);
  arguments->tensor("used_k", call.used_k);
}

}  // namespace flashplug
