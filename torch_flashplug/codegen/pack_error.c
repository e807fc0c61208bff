/* Error reporters that generated kernel wrappers call (declared in CuteDSLRuntime.h of the DSL wheel). Defining both
   functions here lets a kernel pack load where the DSL is not installed. The first argument of each function is
   TVM-FFI's "set raised error". Each function turns the CUDA error into one sentence. */
#include <stdint.h>
#include <stdio.h>

typedef void (*SetRaised)(const char* kind, const char** parts, int32_t num_parts);

/* Resolved from the libcudart loaded in the process. */
extern const char* cudaGetErrorName(int code);
extern const char* cudaGetErrorString(int code);

static void raise_text(SetRaised set_raised, const char* text) {
  if (set_raised) set_raised("RuntimeError", &text, 1);
}

void CuteDSLRT_TVMFFISetRaisedCudaError(SetRaised set_raised, int32_t code) {
  char text[256];
  snprintf(text, sizeof text, "torch_flashplug kernel launch: %s (%d): %s", cudaGetErrorName(code), code,
           cudaGetErrorString(code));
  raise_text(set_raised, text);
}

void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(SetRaised set_raised, int32_t grid_x, int32_t grid_y, int32_t grid_z,
                                              int32_t block_x, int32_t block_y, int32_t block_z, int32_t block_threads,
                                              int64_t dynamic_smem, int32_t device, int32_t max_threads,
                                              int32_t max_block_x, int32_t max_block_y, int32_t max_block_z,
                                              int32_t max_grid_x, int32_t max_grid_y, int32_t max_grid_z,
                                              int32_t max_smem, int32_t max_smem_optin, const char* violation,
                                              const char* source_file, int32_t source_line, int32_t source_col,
                                              int32_t source_end_col) {
  char text[640];
  (void)source_file, (void)source_line, (void)source_col,
      (void)source_end_col; /* paths on the machine that built the pack */
  snprintf(text, sizeof text,
           "torch_flashplug kernel launch refused: %s; grid (%d, %d, %d) of at most (%d, %d, %d), block (%d, %d, %d) = "
           "%d threads of at most %d "
           "(%d, %d, %d), shared memory %lld B of at most %d B (%d B by opt-in), device %d",
           violation ? violation : "limits exceeded", grid_x, grid_y, grid_z, max_grid_x, max_grid_y, max_grid_z,
           block_x, block_y, block_z, block_threads, max_threads, max_block_x, max_block_y, max_block_z,
           (long long)dynamic_smem, max_smem, max_smem_optin, device);
  raise_text(set_raised, text);
}
