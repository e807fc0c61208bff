"""attention(), the 8-bit tensor accepted by F.sdpa, and the cache for transformers built on the 8-bit tensor."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_flashplug
from torch_flashplug import QuantizedTensor, attention
from torch_flashplug.dispatch import bindings
from torch_flashplug.ops.quantize_reference import in_int8, mean_of_finite, rotate, unrotate

SEED = 20261125
FORMATS = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
sdpa = F.scaled_dot_product_attention


def random_tensor(*sizes: int, dtype: torch.dtype = torch.bfloat16, seed: int = SEED) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def quantize(x: Tensor, *, rotated: bool = False, shifted: bool = False) -> QuantizedTensor:
    """Return a tensor (B, Hkv, S, D) in INT8."""
    shift = mean_of_finite(x.float()) if shifted else None
    rows = x.float() - (0.0 if shift is None else shift)
    return QuantizedTensor(*in_int8(rotate(rows) if rotated else rows), x.dtype, shift, rotated)


# ---- attention() ----


def test_attention_equals_f_sdpa_with_transposed_operands(device: str) -> None:
    q, k, v = (random_tensor(2, 33, heads, 64, seed=i).to(device) for i, heads in enumerate((4, 2, 2)))
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    expected = sdpa(*turned, is_causal=True, enable_gqa=True, scale=0.3).transpose(1, 2)
    for causal in (True, "bottom_right", "top_left"):
        assert torch.equal(attention(q, k, v, causal=causal, scale=0.3), expected)
    assert torch.equal(attention(q, k, v), sdpa(*turned, enable_gqa=True).transpose(1, 2))


@pytest.mark.parametrize("Sq", [1, 5])
def test_causal_is_bottom_right(device: str, Sq: int) -> None:
    """Causal masking is bottom-right, as in flash-attn: the last query sees all keys."""
    q, k, v = (random_tensor(1, rows, 2, 64, seed=i).to(device) for i, rows in enumerate((Sq, 20, 20)))
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    bottom_right = torch.ones(Sq, 20, dtype=torch.bool, device=device).tril(20 - Sq)
    assert distance(attention(q, k, v, causal=True), sdpa(*turned, bottom_right).transpose(1, 2)) < 4e-3
    top = torch.ones(Sq, 20, dtype=torch.bool, device=device).tril()
    assert distance(attention(q, k, v, causal="top_left"), sdpa(*turned, top).transpose(1, 2)) < 4e-3


@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("Sq", [1, 3, 70])
def test_8_bit_keys_equal_dequantized_keys(device: str, Sq: int, dtype: torch.dtype, causal: bool | str) -> None:
    """Check decode calls, served by an 8-bit kernel on a GPU, and more rows, served in 16 bits."""
    q = random_tensor(2, Sq, 8, 64).to(device)
    k8, v8 = (random_tensor(2, 90, 2, 64, dtype=torch.float32, seed=i).mul(20).to(dtype).to(device) for i in (1, 2))
    generators = (torch.Generator().manual_seed(i) for i in (1, 2))
    scales = [torch.rand(2, 2, 90, generator=generator).add(0.5).div(20).to(device) for generator in generators]
    k, v = (x.float() * s.transpose(1, 2).unsqueeze(-1) for x, s in zip((k8, v8), scales))
    bindings.counters(reset=True)
    out = attention(q, k8, v8, causal=causal, k_scale=scales[0], v_scale=scales[1])
    assert out.dtype == q.dtype and out.shape == (2, Sq, 8, 64)
    assert device == "cpu" or bindings.counters(reset=True)["ours_fwd"] == 1
    assert distance(out, attention(q.float(), k, v, causal=causal)) < 1e-2


def test_scales_of_every_rank(device: str) -> None:
    q, k8 = (
        random_tensor(2, 1, 4, 64).to(device),
        random_tensor(2, 50, 2, 64, dtype=torch.float32).mul(30).to(torch.int8).to(device),
    )
    rows = torch.rand(2, 2, 50, device=device) / 30
    for scale in (0.03, torch.tensor(0.03), torch.tensor([0.03, 0.02]), rows[:, :, 0], rows, rows[:1], rows[:, :1]):
        device_scale = scale if isinstance(scale, float) else scale.to(device)
        shape = () if isinstance(scale, float) else scale.shape
        full = torch.as_tensor(device_scale, device=device).reshape(
            {1: (1, *shape, 1), 2: (*shape, 1)}.get(len(shape), shape)
        )
        full = full.expand(2, 2, 50).transpose(1, 2).unsqueeze(-1)
        expected = attention(q.float(), k8 * full, k8 * full)
        assert distance(attention(q, k8, k8, k_scale=device_scale, v_scale=device_scale), expected) < 1e-2, shape


def test_attention_refuses_invalid_arguments() -> None:
    q, k8 = random_tensor(2, 1, 4, 64), torch.zeros(2, 50, 2, 64, dtype=torch.int8)
    unit_scales = {"k_scale": 1.0, "v_scale": 1.0}
    for error, message, call in (
        (
            ValueError,
            "k_scale must be a number or a tensor .* for int8, but got None",
            lambda: attention(q, k8, k8, v_scale=1.0),
        ),
        (
            ValueError,
            r"v_scale must have shape .*, but got \(3,\)",
            lambda: attention(q, k8, k8, k_scale=1.0, v_scale=torch.ones(3)),
        ),
        (
            ValueError,
            "k and v must have one 8-bit dtype of",
            lambda: attention(q, k8, k8.to(torch.bfloat16), **unit_scales),
        ),
        (ValueError, "k and v must have one 8-bit dtype of", lambda: attention(k8, k8, k8, **unit_scales)),
        (
            ValueError,
            "v_scale must be None unless k and v have one of torch.int8",
            lambda: attention(q, q, q, **unit_scales),
        ),
        (ValueError, "causal must be .*, but got 0", lambda: attention(q, k8, k8, causal=0, **unit_scales)),
        (
            ValueError,
            "q, k and v must be on one device, but are on cpu, meta, cpu",
            lambda: attention(q, k8.to("meta"), k8, **unit_scales),
        ),
        (TypeError, "k_scale must be .*, but got list", lambda: attention(q, k8, k8, k_scale=[1.0], v_scale=1.0)),
        (ValueError, "q, k and v must have shapes", lambda: attention(q, k8[:1], k8, **unit_scales)),
        (ValueError, "q, k and v must have shapes", lambda: attention(q[:, :, :3], k8, k8, **unit_scales)),
        (
            ValueError,
            "causal must be False, True, .*, but got 'left'",
            lambda: attention(q, k8, k8, causal="left", **unit_scales),
        ),
        (TypeError, "k must be a tensor .*, but got 3-D", lambda: attention(q, k8[0], k8, **unit_scales)),
        (TypeError, "q must be a tensor .*, but got list", lambda: attention([1], k8, k8, **unit_scales)),
    ):
        with pytest.raises(error, match=message):
            call()
    out = attention(q.requires_grad_(), k8, k8, **unit_scales)
    with pytest.raises(
        RuntimeError, match="gradients are not supported for 8-bit key .*. Call attention.. under torch.no_grad"
    ):
        out.sum().backward()


def test_op_refuses_invalid_arguments(device: str) -> None:
    q, k8 = random_tensor(1, 2, 1, 64).to(device), torch.zeros(1, 2, 9, 64, dtype=torch.int8, device=device)
    ones, op = torch.ones(1, 2, 9, device=device), torch.ops.torch_flashplug.quantized_kv_fwd
    for arguments in ((q, k8, k8, ones[..., :8], ones), (q, k8, k8, ones, ones.double()), (q[0], k8, k8, ones, ones)):
        with pytest.raises(RuntimeError):
            op(*arguments, None, False, None)
    torch.library.opcheck(op, (q, k8, k8, ones, ones, None, True, None), test_utils=("test_schema", "test_faketensor"))


# ---- QuantizedTensor ----


@pytest.mark.parametrize("more", [{}, {"rotated": True}, {"rotated": True, "shifted": True}], ids=str)
def test_quantized_tensor_behaves_like_the_dequantized_tensor(more: dict[str, bool]) -> None:
    x = random_tensor(2, 3, 40, 96)
    quantized = quantize(x, **more)
    assert (
        quantized.shape == x.shape
        and quantized.dtype == x.dtype
        and quantized.dim() == 4
        and quantized.device == x.device
    )
    assert distance(quantized.dequantize(), x) < 0.012
    assert torch.equal(quantized + 1, quantized.dequantize() + 1) and type(quantized + 1) is Tensor
    assert type(quantized[:, :, 3:5]) is Tensor and type(torch.cat([quantized, x], 2)) is Tensor
    for copied in (
        copy.deepcopy(quantized),
        quantized.clone(),
        quantized.detach(),
        quantized.to("cpu"),
        quantized.to(x.dtype),
    ):
        assert type(copied) is QuantizedTensor and torch.equal(copied.dequantize(), quantized.dequantize())
    assert type(quantized.float()) is Tensor
    assert "QuantizedTensor" in repr(quantized)
    assert distance(unrotate(rotate(x.float())), x) < 1e-6
    data8, scale = quantized.data8, quantized.scale
    for arguments in (
        (x, scale, x.dtype), (data8, scale[..., :3], x.dtype), (data8, scale, torch.int8), (data8, scale, x.dtype, x),
        (data8, scale.to("meta"), x.dtype),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="^QuantizedTensor: .* must be .*, but"):
            QuantizedTensor(*arguments)
    writes_with_arguments = (
        lambda: quantized.copy_(x),
        lambda: quantized.__setitem__(0, 0.0),
        lambda: torch.add(x, x, out=quantized),
    )
    for write in (quantized.zero_, *writes_with_arguments):
        with pytest.raises(RuntimeError):
            write()
    assert torch.equal(quantized.data8, data8) and torch.equal(
        torch.empty_like(x).copy_(quantized), quantized.dequantize()
    )
    assert type(quantized.clone(memory_format=torch.channels_last)) is QuantizedTensor


CALLS = {
    "plain": {},
    "mask": {"attn_mask": torch.rand(2, 1, 3, 70, generator=torch.Generator().manual_seed(1)) < 0.5},
    "bias": {"attn_mask": torch.randn(3, 70, generator=torch.Generator().manual_seed(1))},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
}


@pytest.mark.parametrize("name", CALLS)
def test_f_sdpa_accepts_a_quantized_tensor(device: str, name: str) -> None:
    q, k, v = (random_tensor(2, heads, rows, 64, seed=i) for i, (heads, rows) in enumerate(((8, 3), (2, 70), (2, 70))))
    arguments = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in CALLS[name].items()}
    if name == "mask":
        arguments["attn_mask"][..., 0] = True
    keys, values = quantize(k.to(device), rotated=True, shifted=True), quantize(v.to(device))
    bindings.counters(reset=True)
    out = sdpa(q.to(device), keys, values, enable_gqa=True, **arguments)
    assert device == "cpu" or name == "bias" or bindings.counters(reset=True)["ours_fwd"] == 1
    dequantized = [x.dequantize().float() for x in (keys, values)]
    assert (
        type(out) is Tensor
        and distance(out, sdpa(q.to(device).float(), *dequantized, enable_gqa=True, **arguments)) < 1e-2
    )


def test_unsupported_8_bit_calls_run_in_16_bits(device: str) -> None:
    """Check gradients of the query, dropout, and errors of stock."""
    q, k, v = (random_tensor(1, heads, 70, 64, seed=i).to(device) for i, heads in enumerate((4, 2, 2)))
    keys, values = quantize(k, rotated=True), quantize(v)
    q.requires_grad_()
    sdpa(q, keys, values, enable_gqa=True).sum().backward()
    expected = q.detach().clone().requires_grad_()
    sdpa(expected, keys.dequantize(), values.dequantize(), enable_gqa=True).sum().backward()
    assert distance(q.grad, expected.grad) < 1e-3  # dQ is accumulated in any order
    with torch.no_grad():
        assert sdpa(q, keys, values, dropout_p=0.5, enable_gqa=True).shape == q.shape
        with pytest.raises(RuntimeError):
            sdpa(q, keys, values)
        with pytest.raises(RuntimeError):
            sdpa(q.float(), keys, values, enable_gqa=True)


@torch.no_grad()
def test_compiled_8_bit_graph_serves_all_lengths(device: str, fresh_dynamo: None) -> None:
    """Compile a single graph for any length."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, enable_gqa=True) * 2

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for keys in (40, 50, 64):
        q, k, v = (random_tensor(1, h, rows, 64).to(device) for h, rows in ((4, 1), (2, keys), (2, keys)))
        arguments = q, quantize(k, rotated=True), quantize(v)
        assert torch.equal(compiled(*arguments), model(*arguments))


@pytest.mark.gpu
@torch.no_grad()
def test_cuda_graph_reads_the_current_cache() -> None:
    q, x = random_tensor(1, 8, 1, 128).cuda(), random_tensor(1, 2, 500, 128).cuda()
    keys, values = quantize(x, rotated=True), quantize(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sdpa(q, keys, values, enable_gqa=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sdpa(q, keys, values, enable_gqa=True)
    for seed in (1, 2):
        values_of_seed = random_tensor(1, 2, 500, 128, seed=seed).cuda()
        for cache, new in ((keys, quantize(values_of_seed, rotated=True)), (values, quantize(values_of_seed))):
            cache.data8.copy_(new.data8), cache.scale.copy_(new.scale)
        graph.replay()
        assert torch.equal(out, sdpa(q, keys, values, enable_gqa=True))
        assert distance(out, sdpa(q, values_of_seed, values_of_seed, enable_gqa=True)) < 0.02


def test_forward_mode_equals_16_bits() -> None:
    q, x = random_tensor(1, 4, 3, 64, dtype=torch.float32), random_tensor(1, 2, 70, 64, dtype=torch.float32)
    keys, values = quantize(x, rotated=True), quantize(x)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        pairs = [(keys, values), (keys.dequantize(), values.dequantize())]
        tangents = [torch.func.jvp(lambda q, kv=kv: sdpa(q, *kv, enable_gqa=True), (q,), (q,))[1] for kv in pairs]
    assert distance(*tangents) < 1e-5 and tangents[1].abs().max() > 0.01
    with pytest.raises(RuntimeError, match="forward mode"):
        rows = [t.transpose(1, 2) for t in (keys.data8, values.data8)]
        torch.func.jvp(lambda q: attention(q.transpose(1, 2), *rows, k_scale=1.0, v_scale=1.0), (q,), (q,))


def test_rotated_cache_in_a_graph_of_symbolic_shapes(fresh_dynamo: None) -> None:
    compiled = torch.compile(lambda k: k.float(), backend="aot_eager", dynamic=True)
    for D in (64, 96):
        keys = quantize(random_tensor(1, 2, 20, D), rotated=True)
        assert torch.equal(compiled(keys), keys.float())


def test_forced_stock_serves_8_bit_caches(device: str) -> None:
    q, x = random_tensor(1, 4, 1, 64).to(device), random_tensor(1, 2, 70, 64).to(device)
    operands = q, quantize(x, rotated=True), quantize(x)
    expected = sdpa(*operands, enable_gqa=True)
    with torch_flashplug.sdpa_backend("stock"):
        assert distance(sdpa(*operands, enable_gqa=True), expected) < 1e-2


# ---- transformers ----


def make_tiny_model() -> tuple[object, Tensor]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(SEED)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=256, max_position_embeddings=512)
    return transformers.LlamaForCausalLM(config).eval().to(torch.bfloat16), torch.randint(3, 256, (2, 40))


@torch.no_grad()
def test_generate_with_an_int8_cache(device: str) -> None:
    """The logits of the prompt have the same bits; logits of later tokens, which read 8-bit keys, are close."""
    model, prompt = make_tiny_model()
    from transformers import DynamicCache

    from torch_flashplug.integrations.transformers import Int8Cache

    model, prompt = model.to(device), prompt.to(device)
    logits = {}
    for kind in (DynamicCache, Int8Cache):
        cache, tokens = kind(config=model.config), prompt
        logits[kind] = []
        for step in range(6):
            out = model(tokens, past_key_values=cache, use_cache=True)
            logits[kind].append(out.logits[:, -1].float())
            tokens = torch.full((2, 1), 7 + step, device=device)
        assert cache.get_seq_length() == 45
        assert model.generate(prompt, past_key_values=kind(config=model.config), max_new_tokens=4).shape == (2, 44)
    pairs = list(zip(logits[Int8Cache], logits[DynamicCache]))
    assert torch.equal(*pairs[0])
    assert all(distance(*pair) < 0.03 for pair in pairs)


def test_cache_written_by_token_equals_cache_written_at_once() -> None:
    """Compare two layers with an equal first update, bit for bit."""
    pytest.importorskip("transformers")
    from torch_flashplug.integrations.int8_cache import Int8Layer

    k, v = random_tensor(2, 2, 150, 96), random_tensor(2, 2, 150, 64, seed=1)
    slow, fast = Int8Layer(), Int8Layer()
    for layer in (slow, fast):
        assert layer.update(k[:, :, :50], v[:, :, :50])[0] is not None
    for token in range(50, 150):
        keys, values = slow.update(k[:, :, token : token + 1], v[:, :, token : token + 1])
    at_once = fast.update(k[:, :, 50:], v[:, :, 50:])
    for token_by_token, at_once_tensor in zip((keys, values), at_once):
        assert torch.equal(token_by_token.data8, at_once_tensor.data8) and torch.equal(
            token_by_token.scale, at_once_tensor.scale
        )
    assert distance(keys.dequantize(), k) < 0.012 and distance(values.dequantize(), v) < 0.012


def test_cache_supports_operations_of_generation() -> None:
    pytest.importorskip("transformers")
    from torch_flashplug.integrations.int8_cache import Int8Layer

    k, v = random_tensor(3, 2, 20, 64), random_tensor(3, 2, 20, 64, seed=1)
    layer = Int8Layer()
    layer.update(k, v)
    layer.reorder_cache(torch.tensor([2, 0, 1]))
    assert distance(layer.keys.dequantize(), k[[2, 0, 1]]) < 0.012
    layer.crop(-5)
    assert layer.get_seq_length() == 15 and layer.keys.shape == (3, 2, 15, 64)
    layer.batch_select_indices(torch.tensor([1]))
    assert distance(layer.values.dequantize(), v[[0], :, :15]) < 0.012
    layer.batch_repeat_interleave(2)
    assert layer.keys.shape == (2, 2, 15, 64)
    layer.offload(), layer.prefetch()
    with pytest.raises(ValueError, match="negated number"):
        layer.crop(3)
    layer.crop(-15)
    assert layer.get_seq_length() == 0 and torch.equal(layer.update(k, v)[0], k)
    layer.reset()
    assert layer.get_seq_length() == 0 and torch.equal(layer.update(k, v)[0], k)


def test_cache_supports_unusual_updates() -> None:
    """Use prompts of one token, a wide head, inference mode before a second mode, and gradients.

    Also check the size of the cache in bytes.
    """
    pytest.importorskip("transformers")
    from torch_flashplug.integrations.int8_cache import Int8Layer

    k = random_tensor(1, 2, 1200, 64)
    k[:, :, 0] *= 100.0
    one_token_layer = Int8Layer()
    one_token_layer.update(k[:, :, :1], k[:, :, :1])
    keys, _ = one_token_layer.update(k[:, :, 1:], k[:, :, 1:])
    assert distance(keys.dequantize()[:, :, 1:], k[:, :, 1:]) < 0.012
    wide = Int8Layer()
    x = random_tensor(1, 1, 20, 512)
    wide.update(x, x)
    assert distance(wide.keys.dequantize(), x) < 0.012
    layer = Int8Layer()
    with torch.inference_mode():
        layer.update(k[:, :, :1000], k[:, :, :1000])
    keys, values = layer.update(k[:, :, 1000:1001].requires_grad_(), k[:, :, 1000:1001])
    assert keys.shape[2] == 1001 and not keys.scale.requires_grad
    assert distance(values.dequantize(), k[:, :, :1001]) < 0.012
    num_bytes = sum(x.numel() * x.element_size() for rows in layer._rows for x in (rows.data8, rows.scale))
    assert num_bytes < 0.62 * 2 * 2 * 1001 * 2 * 64


def test_explain_reports_the_reader_of_an_8_bit_cache() -> None:
    q, x = random_tensor(1, 32, 1, 128), random_tensor(1, 8, 500, 128)
    keys, values = quantize(x, rotated=True), quantize(x)
    plan = torch_flashplug.explain(q, keys, values, enable_gqa=True, device="h100")
    assert plan.backend == "fa2" and plan.kernel.startswith("decode_sm80_bf16_int8_d128_cache8_") and plan.splits > 1
    assert "as int8 (rotated)." in plan.copies and "8 bits" in plan.reasons["fa3"]
    for call, device in (((random_tensor(1, 32, 300, 128), keys, values), "h100"), ((q, keys, values), None)):
        plan = torch_flashplug.explain(*call, enable_gqa=True, device=device)
        assert plan.why_not_8bit.startswith("Key and value are converted to 16 bits first. ")
        assert "cache8" not in plan.kernel
    plan = torch_flashplug.explain(q, keys, values, dropout_p=0.1, enable_gqa=True, device="h100")
    assert "cache8" not in plan.kernel and "converted to 16 bits" in str(plan)


@torch.no_grad()
def test_vmap_and_flop_count_of_8_bit_calls(device: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    q = random_tensor(3, 2, 1, 4, 64).to(device)
    k8 = random_tensor(3, 2, 50, 2, 64, dtype=torch.float32).mul(30).to(torch.int8).to(device)

    def call(q: Tensor, k8: Tensor) -> Tensor:
        return attention(q, k8, k8, k_scale=0.03, v_scale=0.02)

    mapped = torch.vmap(call)(q, k8)
    assert distance(mapped, torch.stack([call(*mapped_args) for mapped_args in zip(q, k8)])) < 4e-3
    shared = torch.vmap(call, in_dims=(0, None))(q, k8[0])
    assert distance(shared, torch.stack([call(mapped_args, k8[0]) for mapped_args in q])) < 4e-3
    arguments = (q[0].transpose(1, 2), *[k8[0].transpose(1, 2)] * 2, *[torch.ones(2, 2, 50, device=device)] * 2)
    with FlopCounterMode(display=False) as counter:
        torch.ops.torch_flashplug.quantized_kv_fwd(*arguments, None, False, None)
    assert counter.get_total_flops() >= 2 * 2 * 2 * 4 * 50 * 64
