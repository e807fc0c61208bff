"""FP8 attention of cuDNN as a peer, called through the Python frontend (nvidia-cudnn-frontend) if installed.

Operands are scaled by the largest entry of each tensor. O is in bf16 if cuDNN has such a plan, else in e4m3.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_flashplug.registry.quant_recipes import FORMAT_MAX
from torch_flashplug.testing import Case, Inputs


def by_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a tensor (B, H, S, D) to e4m3, and return the values and the scale of shape (1, 1, 1, 1)."""
    scale = x.abs().amax().float() / FORMAT_MAX["e4m3"]
    return (x.float() / scale).to(torch.float8_e4m3fn), scale.view(1, 1, 1, 1)


def call(inputs: Inputs, case: Case) -> Callable[[], Tensor]:
    """Return a function that runs only the attention kernel, on operands quantized in advance.

    Raises:
        ImportError: the frontend of cuDNN is not installed.
        RuntimeError: cuDNN has no plan for the case.
    """
    import cudnn

    reasons = []
    for out in (torch.bfloat16, torch.float8_e4m3fn):
        try:
            return _planned(cudnn, inputs, case, out)
        except Exception as reason:  # exceptions of the frontend have no common base class
            reasons.append(f"O in {out}: {type(reason).__name__}: {reason}")
    raise RuntimeError("; ".join(reasons))


def _planned(cudnn, inputs: Inputs, case: Case, dtype: torch.dtype) -> Callable[[], Tensor]:
    q, k, v = (by_tensor(x) for x in inputs)
    unit_scale = torch.ones(1, 1, 1, 1, device=q[0].device)
    s_scale = unit_scale * FORMAT_MAX["e4m3"]  # probabilities are at most 1, so this scale uses the full range of e4m3
    operands = {
        "q": q[0], "k": k[0], "v": v[0], "descale_q": q[1], "descale_k": k[1], "descale_v": v[1],
        "descale_s": 1.0 / s_scale, "scale_s": s_scale, "scale_o": unit_scale,
    }  # fmt: skip
    types = cudnn.data_type
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    graph = cudnn.pygraph(
        io_data_type=types.FP8_E4M3, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT, handle=handle
    )
    tensors = {
        name: graph.tensor(
            name=name, dim=list(x.shape), stride=list(x.stride()),
            data_type=types.FP8_E4M3 if x.element_size() == 1 else types.FLOAT,
        )
        for name, x in operands.items()
    }  # fmt: skip
    scale = case.D**-0.5 if case.scale is None else case.scale
    o, _, *largest = graph.sdpa_fp8(**tensors, is_inference=True, attn_scale=scale, use_causal_mask=case.causal)
    out = torch.empty(case.B, case.Sq, case.Hq, case.Dv, device=unit_scale.device, dtype=dtype).transpose(1, 2)
    kind = types.BFLOAT16 if dtype == torch.bfloat16 else types.FP8_E4M3
    o.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride())).set_data_type(kind)
    sums = [torch.zeros_like(unit_scale) for _ in largest]
    for x in largest:
        x.set_output(True).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1]).set_data_type(types.FLOAT)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(1, graph.get_workspace_size()), device=unit_scale.device, dtype=torch.uint8)
    bound = {tensors[name]: x for name, x in operands.items()} | {o: out} | dict(zip(largest, sums, strict=True))

    def run() -> Tensor:
        graph.execute(bound, workspace, handle=handle)
        return out

    run()
    torch.cuda.synchronize()
    return run
