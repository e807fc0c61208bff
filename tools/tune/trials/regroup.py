"""Time forward and backward of causal D 104 to 120 with grouped heads, ours over stock (about 12 s)."""
import itertools, torch, torch.nn.functional as F, torch_flashplug as fp
from torch_flashplug.demo.scopes import plugin_off
from torch_flashplug.testing import Candidate, time_interleaved
for d, g, s in itertools.product((104, 112, 120), (4, 5, 8), (1536, 2048, 4096, 8192)):
    hkv = 8; b = max(1, 8192 // s)
    q, k, v = (torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for h in (hkv * g, hkv, hkv))
    go = torch.randn(b, s, hkv * g, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    def call():
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), (q, k, v), go)
    t = time_interleaved({"ours": Candidate(call, lambda: fp.sdpa_backend("fa3")), "stock": Candidate(call, plugin_off)}, rounds=5, device="cuda", round_ms=4.0)
    print(d, g, s, round(t["stock"].ms / t["ours"].ms, 3), flush=True)
