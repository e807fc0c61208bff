// Handlers of operations within a lane: d = work(a), work(a, b), work(a, b, c).
#pragma once

#include "opcodes.h"

namespace interpreter {

template <typename D, typename A, auto work>
Outcome unary(Warp& w, const Instruction& in, uint32_t lanes) {
  D* d = w.lanes<D>(in.operands[0].at);
  const A* a = w.lanes<A>(in.operands[1].at);
  each_lane(lanes, [&](int i) { d[i] = static_cast<D>(work(a[i])); });
  return Outcome::kNext;
}

template <typename D, typename A, typename B, auto work>
Outcome binary(Warp& w, const Instruction& in, uint32_t lanes) {
  D* d = w.lanes<D>(in.operands[0].at);
  const A* a = w.lanes<A>(in.operands[1].at);
  const B* b = w.lanes<B>(in.operands[2].at);
  each_lane(lanes, [&](int i) { d[i] = static_cast<D>(work(a[i], b[i])); });
  return Outcome::kNext;
}

template <typename D, typename A, typename C, auto work>
Outcome ternary(Warp& w, const Instruction& in, uint32_t lanes) {
  D* d = w.lanes<D>(in.operands[0].at);
  const A *a = w.lanes<A>(in.operands[1].at), *b = w.lanes<A>(in.operands[2].at);
  const C* c = w.lanes<C>(in.operands[3].at);
  each_lane(lanes, [&](int i) { d[i] = static_cast<D>(work(a[i], b[i], c[i])); });
  return Outcome::kNext;
}

}  // namespace interpreter
