// What torch's own doors to attention on end share (varlen.cpp, flash_attention_op.cpp): tensors with rows ahead of
// heads, (T, H, D) of sequences on end or (B, S, H, D), bottom-right windows, an LSE and a state of dropout as stock's
// flash leaves them. What is not ours goes on to stock.
#pragma once

#include "hooks/boxed_args.h"
#include "ops/attention.h"

namespace flashplug {

// The call that a door was asked for, its operands seen with heads ahead of rows.
struct DoorCall {
  // into: where the output is to be, or null.
  DoorCall(const Boxed& given, Window window, AtenTensorHandle into = nullptr);
  Owned q, k, v, into;
  ForwardCall call;
};

// Whether kernels of ours take what a door was given, whatever their speed: 16 bits, whole head dims, rows on end
// (dims 3) or not (4), no pages, no splits that somebody has asked for.
bool kernels_take(const Boxed& given, int64_t dims);
int64_t dims_of(AtenTensorHandle tensor);
int compute_capability(AtenTensorHandle query);

// By kernels of ours; false: stock is to go on. A forced backend raises what is in the way.
bool by_kernels(const char* where, const DoorCall& door, ForwardResult* result);

// What stock's flash leaves.
struct FlashResult {
  Owned out, lse, rng;
};
FlashResult as_stocks(ForwardResult result, const DoorCall& door, AtenTensorHandle query);
void write_to(AtenTensorHandle out, AtenTensorHandle found);  // unless it is there already
// Whether our forward left it, so that the backward is ours as well.
bool is_ours(AtenTensorHandle rng);

// Gradients of query, key and value by kernels of ours, laid out as torch.empty_like of each; false: there are none.
// lse: of its rows alone, where the op's own has more.
bool gradients_by_kernels(const Boxed& given, Window window, Owned grads[3], AtenTensorHandle lse = nullptr);

// -1: on that side all keys are seen.
Window bottom_right(std::optional<int64_t> left, std::optional<int64_t> right, bool is_causal);

// ---- varlen.cpp ----

// At a dispatch key, ahead of torch's own import of its module, too.
void open_varlen(const char* dispatch_key);
void close_varlen();
void know_varlen(const char* op, const char* schema);  // of the running torch, once that module was imported
void know_varlen_rule(int number);                     // VarlenRule of varlen_decision.h, likewise
int varlen_rule();
// Up-call: makes that known, and stock's bodies callable as torch_flashplug::_stock<op>.
using PrepareCallback = void (*)();
void set_prepare_callback(PrepareCallback callback);

// ---- flash_attention_op.cpp ----

bool know_flash(const char* schema);  // of the running torch's op; false: it is none that stock can be called by
// At one dispatch key, over stock's kernels and those of anyone else. Throws where stock could not be called below.
void open_flash(const char* dispatch_key);
void close_flash();
void prefer_flash(bool on);  // few rows, too

// ---- efficient_attention_op.cpp ----

// At one dispatch key, over stock's kernels. Throws where stock could not be called below.
void open_efficient(const char* dispatch_key);
void close_efficient();

}  // namespace flashplug
