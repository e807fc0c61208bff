"""Issue rates of the instructions of an 8-bit softmax, in clocks of a scheduler for an instruction of a warp.

    python eight_micro.py        needs cupy (NVRTC); takes 10 s. One block on one SM, 1 to 4 warps a scheduler.
"""
import cupy as cp

N, ROUNDS = 32, 64
BODIES = {
    "fma": ('asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x[i]) : "f"(a), "f"(b));', 1),
    "add": ('asm volatile("add.rn.f32 %0, %0, %1;" : "+f"(x[i]) : "f"(a));', 1),
    "ex2": ('asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i]));', 1),
    "e4m3x2": ('{ unsigned short h; asm volatile("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(h) : "f"(x[i]), '
               '"f"(a)); y[i] ^= h; }', 1),
    "e4m3x4": ('if (i % 4 == 0) { unsigned w; asm volatile("{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; '
               'cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; mov.b32 %0, { l, h }; }" : "=r"(w) : "f"(x[i]), "f"(x[i + 1]), '
               '"f"(x[i + 2]), "f"(x[i + 3])); y[i] ^= w; }', 0.5),
    "bf16x2": ('{ unsigned w; asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(x[i]), "f"(a)); '
               'y[i] ^= w; }', 1),
    "xor": ('asm volatile("xor.b32 %0, %0, %1;" : "+r"(y[i]) : "r"(c));', 1),
    "max3": ('asm volatile("{ .reg .s32 t; max.s32 t, %0, %1; max.s32 %0, t, %2; }" : "+r"(y[i]) : "r"(c), "r"(d));', 1),
    "fmax": ('asm volatile("max.f32 %0, %0, %1;" : "+f"(x[i]) : "f"(a));', 1),
    "i2f": ('{ float f; asm volatile("cvt.rn.f32.s32 %0, %1;" : "=f"(f) : "r"(y[i])); x[i] = f; y[i] += 1; }', 1),
    "lea": ('asm volatile("{ .reg .b32 t; shl.b32 t, %1, 23; add.s32 %0, %0, t; }" : "+r"(y[i]) : "r"(c));', 1),
    "ex2+e4m3+add+fma": (
        'asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x[i]) : "f"(a), "f"(b)); '
        'asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i])); s += x[i]; '
        'if (i % 4 == 3) { unsigned w; asm volatile("{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; '
        'cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; mov.b32 %0, { l, h }; }" : "=r"(w) : "f"(x[i]), "f"(x[i - 1]), '
        '"f"(x[i - 2]), "f"(x[i - 3])); y[i] ^= w; }', 1),
    "ex2+add+fma": (
        'asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x[i]) : "f"(a), "f"(b)); '
        'asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i])); s += x[i];', 1),
}
SOURCE = r"""
extern "C" __global__ void run(float* out, long long* clocks, float a, float b, unsigned c, unsigned d) {
  float x[%(N)d], s = 0; unsigned y[%(N)d];
  #pragma unroll
  for (int i = 0; i < %(N)d; ++i) { x[i] = a * (threadIdx.x + i); y[i] = c * (threadIdx.x + i); }
  __syncthreads();
  long long start = clock64();
  #pragma unroll 1
  for (int round = 0; round < %(R)d; ++round) {
    #pragma unroll
    for (int i = 0; i < %(N)d; ++i) { %(body)s }
  }
  long long end = clock64();
  #pragma unroll
  for (int i = 0; i < %(N)d; ++i) s += x[i] + (float)y[i];
  out[threadIdx.x] = s; if (threadIdx.x %% 32 == 0) clocks[threadIdx.x / 32] = end - start;
}
"""
print("clocks of a scheduler for each instruction (mixtures: for each exponential), 1, 2, 3, 4 warps a scheduler")
for name, (body, per) in BODIES.items():
    kernel = cp.RawModule(code=SOURCE % {"N": N, "R": ROUNDS, "body": body}, options=("--gpu-architecture=sm_90a",)).get_function("run")
    figures = []
    for warps in (1, 2, 3, 4):
        out, clocks = cp.zeros(1024, cp.float32), cp.zeros(32, cp.int64)
        for _ in range(3):
            kernel((1,), (128 * warps,), (out, clocks, cp.float32(0.5), cp.float32(0.1), cp.uint32(3), cp.uint32(5)))
        cp.cuda.Device().synchronize()
        count = N * ROUNDS * (per if per >= 1 else per)
        figures.append(int(clocks[: 4 * warps].max()) / count / warps)
    print(f"{name:18}", " ".join(f"{x:6.2f}" for x in figures), flush=True)
