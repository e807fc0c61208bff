// What windows, sequences on end and pages bring to kernels beside their bounds, which are facts of a call: a logit of
// each head, and the gradient of the LSE. A call without one gives a tensor without elements.
#include <algorithm>

#include "arguments.h"
#include "attention.h"

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

// Lists of tiles, as many as a kernel may want: room for blocks of the least size, one more for each sequence, and for
// what is none's on either side; a sector each, and one for its number (kernels/parts/lengths.py).
Lengths give_lengths(const ForwardCall& call, const Problem& p, const TensorClass& query, Arguments* arguments) {
  if (!arguments->takes("lists")) return {};
  constexpr int64_t most_lists = 3, sector = 8, least = 64, one = 1;
  const int64_t room = std::max(p.Sq, p.Sk) / least + p.sequences + 2, words = most_lists * sector * (room + 1);
  Lengths given;
  given.lists = empty_strided(1, &words, &one, aoti_torch_dtype_int32(), query.device_type, query.device_index);
  arguments->tensor("cu_q", call.cu_q);
  arguments->tensor("cu_k", call.cu_k);
  constexpr int64_t none = 0;
  given.used_k = is_there(call.used_k) ? Owned::share(call.used_k) : view(call.cu_k, 1, &none, &one);
  arguments->tensor("used_k", given.used_k.get());
  arguments->tensor("lists", given.lists.get(), true);
  return given;
}

void give_pages(const ForwardCall& call, Arguments* arguments) {
  if (!arguments->takes("pages")) return;
  arguments->tensor("pages", call.pages);
  arguments->tensor("used_k", call.used_k);
}

}  // namespace flashplug
