import torch, torch.nn.functional as F, math, torch_flashplug
from torch_flashplug import native
torch.manual_seed(1)
def exact(q,k,v,m): 
    s=(q.double()@k.double().mT*q.shape[-1]**-.5).masked_fill(~m,-math.inf); return s.softmax(-1)@v.double()
mask=torch.ones(128,128,dtype=torch.bool,device="cuda").tril()
worst={}
for it in range(300):
    for grad in (False,True):
        for mode in ("auto","stock"):
            q,k,v=(torch.randn(2,4,128,64,device="cuda",dtype=torch.bfloat16,requires_grad=grad) for _ in range(3))
            with torch_flashplug.sdpa_backend(mode): o=F.scaled_dot_product_attention(q,k,v,mask)
            e=float((o.detach().double()-exact(q.detach(),k.detach(),v.detach(),mask)).abs().max())
            key=(mode,grad); w=worst.setdefault(key,[0,0]); w[0]=max(w[0],e); w[1]+=e>0.05
print("eager tril", worst, flush=True)
import torch.compiler
def in_regions(q,k,v,mask):
    @torch.compiler.nested_compile_region
    def region(q,k,v,mask): return F.scaled_dot_product_attention(q,k,v,mask)
    return region(q,k,v,mask)+region(k,q,v,mask)
try:
    import sys; sys.path.insert(0,"test"); sys.path.insert(0,"test/torch")
    import test_tracers
    fn=test_tracers.in_regions
except Exception as err: print("import",err); fn=in_regions
q,k,v=(torch.randn(2,4,128,64,device="cuda",dtype=torch.bfloat16,requires_grad=True) for _ in range(3))
c=torch.compile(fn,fullgraph=True,backend="aot_eager")
for sign in (1,-1):
    for mode in ("auto","stock"):
        with torch_flashplug.sdpa_backend(mode): got=fn(q*sign,k,v,mask)
        print("eager",mode,sign, "vs", end=" ")
        native.counters(reset=True); comp=c(q*sign,k,v,mask); print(native.counters()["ours_fwd"], end=" ")
        torch_flashplug.disable(); st=fn(q*sign,k,v,mask); torch_flashplug.enable()
        print("compiled-eager", float((comp-got).abs().max()), "stock-eager", float((st-got).abs().max()), "stock-compiled", float((st-comp).abs().max()), flush=True)
