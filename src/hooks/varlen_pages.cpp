// Calls of varlen_attn with a paged KV cache. A decode kernel reads the pages in place where each sequence has at most
// one query row, a forward kernel in all other calls. Without such a kernel the pages are gathered, and the kernels of
// packed sequences run.
//
// With num_splits=1 the decode kernel does not run. A sequence then meets the same kernel alone, in a batch of single
// rows and in a batch with longer sequences, as torch promises.
#include <algorithm>
#include <cstdint>
#include <exception>
#include <utility>

#include "core/attention_call.h"
#include "core/schemas.h"
#include "core/values.h"
#include "hooks/varlen_common.h"
#include "operands/operands.h"
#include "ops/ops.h"

namespace flashplug {

namespace {

// View packed rows (1, H, T, D) as T sequences of one row: (T, H, 1, D).
TensorHandle rows_as_batch(AtenTensorHandle x) {
  const Shape packed = shape_of(x);
  const int64_t size[4] = {packed.size[2], packed.size[1], 1, packed.size[3]};
  const int64_t stride[4] = {packed.stride[2], packed.stride[1], packed.stride[2], packed.stride[3]};
  return view(x, 4, size, stride);
}

// Return the inverse view of `rows_as_batch()`.
TensorHandle batch_as_rows(AtenTensorHandle x) {
  const Shape batch = shape_of(x);
  const int64_t size[4] = {1, batch.size[1], batch.size[0], batch.size[3]};
  const int64_t stride[4] = {batch.size[0] * batch.stride[0], batch.stride[1], batch.stride[0], batch.stride[3]};
  return view(x, 4, size, stride);
}

// Return the LSE (T, H, 1) of single rows as a new tensor (1, H, T).
TensorHandle packed_lse(AtenTensorHandle lse) {
  const Shape batch = shape_of(lse);
  const int64_t T = batch.size[0], H = batch.size[1];
  const int64_t size[3] = {1, H, T}, transposed[3] = {H * T, batch.stride[1], batch.stride[0]};
  const int64_t stride[3] = {H * T, T, 1};
  return new_like(lse, 3, size, stride, view(lse, 3, size, transposed).get());
}

// Return the tensor itself, or a row-major copy.
TensorHandle contiguous(AtenTensorHandle x) {
  const Shape shape = shape_of(x);
  const auto dims = static_cast<int>(dims_of(x));
  int64_t stride[4] = {1, 1, 1, 1};
  for (int i = dims - 2; i >= 0; --i) stride[i] = stride[i + 1] * shape.size[i + 1];
  const bool same = std::equal(stride, stride + dims, shape.stride);
  return same ? TensorHandle::share(x) : new_like(x, dims, shape.size, stride, x);
}

// Read the pages of packed queries in place, by the kernels that a forced backend runs. A call that auto serves was
// measured with a forced backend. Returns false without a kernel.
bool attend_packed_in_place(AtenTensorHandle block_table, const HookedCall& hooked, ForwardResult* result) {
  ForwardCall call = hooked.call;
  const TensorHandle table = contiguous(block_table), seqused_k = contiguous(call.seqused_k),
                     cu_seqlens_q = contiguous(call.cu_seqlens_q);
  call.block_table = table.get(), call.seqused_k = seqused_k.get();
  call.cu_seqlens_q = call.cu_seqlens_k = cu_seqlens_q.get();
  if (!call.mode.forces_kernels()) call.mode = Mode::forcing(std::max(call.mode.family(), 0));
  return attend_by_kernel(&call, result);
}

// Read the pages of single rows in place. Returns false without a kernel.
bool attend_rows_in_place(AtenTensorHandle block_table, const HookedCall& hooked, ForwardResult* result) {
  constexpr const Schema& schema = kTablesOfRows;
  ForwardCall call = hooked.call;
  OpCall op(schema);
  op[schema["cu_seqlens_q"]] = box::from_borrowed(call.cu_seqlens_q);
  op[schema["rows"]] = box::from(shape_of(call.q).size[2]);
  op[schema["block_table"]] = box::from_borrowed(block_table);
  op[schema["seqused_k"]] = box::from_borrowed(call.seqused_k);
  op.run();
  const TensorHandle tables = op.result(schema.result("block_table")), lengths = op.result(schema.result("seqused_k"));
  const TensorHandle q = rows_as_batch(call.q);
  const TensorHandle out = call.out == nullptr ? TensorHandle() : rows_as_batch(call.out);
  call.q = q.get(), call.out = out.get();
  call.cu_seqlens_q = call.cu_seqlens_k = nullptr;
  call.max_seqlen_q = call.max_seqlen_k = 0;
  call.block_table = tables.get(), call.seqused_k = lengths.get();
  if (!attend_by_kernel(&call, result)) return false;
  result->out = batch_as_rows(result->out.get());
  result->lse = packed_lse(result->lse.get());
  return true;
}

// Copy the pages of all tables into packed keys and values.
void gather_pages(AtenTensorHandle block_table, HookedCall* hooked) {
  constexpr const Schema& schema = kGatheredPages;
  const ForwardCall& call = hooked->call;
  OpCall op(schema);
  op[schema["key"]] = box::from_borrowed(call.k);
  op[schema["value"]] = box::from_borrowed(call.v);
  op[schema["block_table"]] = box::from_borrowed(block_table);
  op[schema["seqused_k"]] = box::from_borrowed(call.seqused_k);
  op.run();
  hooked->set_packed_keys(op.result(schema.result("key")), op.result(schema.result("value")),
                          op.result(schema.result("cu_seqlens_k")), op.result(schema.result("seqused_k")));
}

}  // namespace

bool run_with_pages(const char* where, AtenTensorHandle block_table, HookedCall* hooked, ForwardResult* result) {
  const ForwardCall& call = hooked->call;
  try {
    const bool is_decode = call.max_seqlen_q == 1 && call.num_splits != 1;
    if (is_decode ? attend_rows_in_place(block_table, *hooked, result)
                  : attend_packed_in_place(block_table, *hooked, result))
      return true;
    gather_pages(block_table, hooked);
  } catch (const std::exception&) {  // without a forced backend, stock serves the call, as in run_with_kernels()
    if (call.mode.forces_kernels()) throw;
    return false;
  }
  return run_with_kernels(where, *hooked, result);
}

}  // namespace flashplug
