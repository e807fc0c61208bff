// A bool mask on its way to kernels. F.sdpa turns it into floats before it calls our op, so the router, which sees it
// as it was given, keeps it for the op that comes next on this thread.
#include <algorithm>
#include <utility>

#include "attention.h"
#include "torch_symbols.h"

namespace flashplug {

namespace {

constexpr int kMostMaskDims = 4;

// Never torn down: at the end of a thread, or of the process, libtorch may be gone.
struct Kept {
  AtenTensorHandle mask = nullptr;
  const void* query = nullptr;  // whose call it belongs to
};
thread_local Kept kept;

const void* address_of(AtenTensorHandle tensor) {
  const void* data = nullptr;
  return torch_get_const_data_ptr(tensor, &data) == 0 ? data : nullptr;
}

bool beside(AtenTensorHandle mask, const TensorClass& query) {
  TensorClass of_mask;
  return read_class(mask, &of_mask) && of_mask.device_type == query.device_type &&
         of_mask.device_index == query.device_index;
}

// Sizes and strides of all four dims, of which those that are broadcast have stride 0; planes that are the same are
// one. False where it is none that kernels take.
bool spread(AtenTensorHandle mask, const Problem& p, int64_t size[4], int64_t stride[4]) {
  int64_t dims = 0;
  Shape shape;
  if (aoti_torch_get_dim(mask, &dims) != 0 || dims < 2 || dims > kMostMaskDims || !read_shape(mask, &shape))
    return false;
  const int64_t wanted[4] = {p.B, p.Hq, p.Sq, p.Sk}, missing = kMostMaskDims - dims;
  for (int64_t i = 0; i < kMostMaskDims; ++i) {
    const int64_t have = i < missing ? 1 : shape.size[i - missing];
    if (have != 1 && have != wanted[i]) return false;
    stride[i] = have == 1 ? 0 : shape.stride[i - missing];
    size[i] = i < 2 && stride[i] == 0 ? 1 : wanted[i];
  }
  return true;
}

}  // namespace

bool mask_fits(AtenTensorHandle mask, const Facts& facts) {
  int64_t size[4], stride[4];
  const TorchSymbols& torch = torch_symbols();
  if (torch.python_dispatch(mask) || torch.wrapped(mask)) return false;  // no address, or not its own
  return beside(mask, facts.operand[0]) && spread(mask, facts.problem, size, stride);
}

void keep_mask(AtenTensorHandle mask, AtenTensorHandle query) {
  kept = {Owned::share(mask).release(), address_of(query)};
}

void forget_mask() {
  if (kept.mask != nullptr) Owned{std::exchange(kept.mask, nullptr)};
}

Owned take_mask(AtenTensorHandle bias, AtenTensorHandle query) {
  Owned mask(std::exchange(kept.mask, nullptr));
  if (!mask.defined() || kept.query != address_of(query)) return {};
  int64_t dims = 0, other = 0;
  Shape given, made;
  if (aoti_torch_get_dim(bias, &dims) != 0 || aoti_torch_get_dim(mask.get(), &other) != 0 || dims != other ||
      !read_shape(bias, &made) || !read_shape(mask.get(), &given))
    return {};
  return std::equal(given.size, given.size + dims, made.size) ? std::move(mask) : Owned();
}

Masked masked(AtenTensorHandle mask, const Problem& p, const TensorClass& query) {
  int64_t size[4], stride[4];
  if (!beside(mask, query)) throw std::runtime_error("torch_flashplug: attn_mask must be on the device of query");
  if (!spread(mask, p, size, stride))
    throw std::runtime_error("torch_flashplug: attn_mask must have 2 to 4 dims that broadcast to (B, Hq, Sq, Sk)");
  Masked result;
  result.mask = view(mask, 4, size, stride);
  const int64_t numbers = digest_numbers(size[0] * size[1], p.Sq, p.Sk), one = 1;
  result.digest = empty_strided(1, &numbers, &one, aoti_torch_dtype_int32(), query.device_type, query.device_index);
  return result;
}

// As `numbers` of kernels/parts/digest.py.
int64_t digest_numbers(int64_t planes, int64_t Sq, int64_t Sk) {
  constexpr int64_t kBlock = 128, kTile = 64, kWords = 128;
  const int64_t M = ceil_div(Sq, kBlock), N = ceil_div(Sk, kBlock);
  const int64_t words = ceil_div(Sq, kTile) * (ceil_div(Sk, kTile) + 1) * kWords;
  return planes * (M * N + 2 * (M + M * N) + words);
}

}  // namespace flashplug
