"""Generation by the unmodified Llama of Hugging Face: with the plugin as without."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from device_backend import DeviceBackend
from llama import VOCABULARY, new_llama, transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

TOKENS, LAYERS, BATCH = 32, 2, 2
# The weights are large, so that attention distinguishes keys and the generated text varies. With the usual 0.02, a
# single token is repeated forever.
INITIALIZER_RANGE = 0.08
# A scale wrong by 2 % moves the logits by 3 spreads, a missing key by 16, a wrong row of V by 40.
SPREAD_FACTOR = 2
# FA2 serves no mask, and the efficient attention serves no GQA. Together both serve every call, as math does.
OTHER_BACKENDS = ([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], [SDPBackend.MATH])

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "no_autograd_cache")


class GenerationCase(NamedTuple):
    """Settings of a generation."""

    cache: str  # "dynamic": as long as the text, no mask; "static": of maximum length, with a mask
    compiled: str  # "nothing", "layers" (each layer separately) or "model" (by transformers)
    prompt: int


class Generated(NamedTuple):
    tokens: Tensor  # (BATCH, TOKENS)
    logits: Tensor  # (BATCH, TOKENS, VOCABULARY)


class Follow(transformers.LogitsProcessor):
    """Logits processor that forces a given text, whatever the logits are."""

    def __init__(self, tokens: Tensor, prompt: int):
        self.tokens, self.prompt = tokens, prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = self.tokens[:, input_ids.shape[1] - self.prompt, None]
        return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)


def compile_settings(device_backend: DeviceBackend, model: nn.Module, compiled: str) -> dict[str, object]:
    """Compile the requested parts of the model and return the settings of generate()."""
    torch._dynamo.reset()  # a graph keeps the attention of its trace
    if compiled == "layers":
        for layer in model.model.layers:
            layer.compile(backend="aot_eager", dynamic=True)
    if compiled != "model":
        return {"disable_compile": True}
    if device_backend.device == "cuda":
        return {"compile_config": transformers.CompileConfig()}
    config = transformers.CompileConfig(backend="aot_eager", mode=None)
    config._compile_all_devices = True
    return {"compile_config": config}


def generate(device_backend: DeviceBackend, generation_case: GenerationCase, follow: Tensor | None = None) -> Generated:
    """Generate greedily by a new model, or along the tokens of `follow`."""
    # without end tokens, a text has exactly the requested length
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"))
    settings = {"initializer_range": INITIALIZER_RANGE, "pad_token_id": 0, **ends}
    model = new_llama(device_backend, layers=LAYERS, hidden_size=256, **settings).eval()
    prompt = torch.randint(VOCABULARY, (BATCH, generation_case.prompt), generator=torch.Generator().manual_seed(1)).to(
        device_backend.device
    )
    result = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=TOKENS,
        do_sample=False,
        cache_implementation=generation_case.cache,
        logits_processor=[] if follow is None else [Follow(follow, generation_case.prompt)],
        return_dict_in_generate=True,
        output_logits=True,
        **compile_settings(device_backend, model, generation_case.compiled),
    )
    return Generated(result.sequences[:, generation_case.prompt :], torch.stack(result.logits, dim=1))


def distance(a: Generated, b: Generated) -> float:
    return (a.logits - b.logits).abs().max().item()


def measure_spread_of_stock(device_backend: DeviceBackend, generation_case: GenerationCase, text: Tensor) -> float:
    """Return the largest distance between backends of stock along a text."""
    eager = generation_case._replace(compiled="nothing")
    default, generations = generate(device_backend, eager, text), []
    for backends in OTHER_BACKENDS:
        with sdpa_kernel(backends):
            generations.append(generate(device_backend, eager, text))
    return max(distance(default, generation) for generation in generations)


@pytest.mark.parametrize(
    "generation_case",
    [
        GenerationCase("dynamic", "nothing", 64),
        GenerationCase("dynamic", "nothing", 300),
        GenerationCase("dynamic", "layers", 300),
        GenerationCase("static", "nothing", 300),
        GenerationCase("static", "model", 300),
    ],
    ids=lambda generation_case: "-".join(map(str, generation_case)),
)
def test_llama_generates_the_tokens_of_stock(device_backend: DeviceBackend, generation_case: GenerationCase) -> None:
    """Compare each token with the most likely token of stock after the same text.

    Ties within roundings of stock are excepted. All attention must run on our kernels, also with a static cache, where
    F.sdpa receives a mask.
    """
    plugin_run = generate(device_backend, generation_case)
    ran = {path: count for path, count in device_backend.pop_path_counts().items() if path.endswith("_fwd")}
    replayed = (
        device_backend.device == "cuda" and generation_case.compiled == "model"
    )  # a replay of a CUDA graph is counted only at capture
    assert ran.keys() == {"ours_fwd"} and (replayed or ran["ours_fwd"] == LAYERS * TOKENS)
    with device_backend.disabled():
        stock_run = generate(device_backend, generation_case, plugin_run.tokens)
        tolerance = SPREAD_FACTOR * measure_spread_of_stock(device_backend, generation_case, plugin_run.tokens)
    assert device_backend.pop_path_counts() == {} and torch.equal(stock_run.tokens, plugin_run.tokens)
    apart = distance(plugin_run, stock_run)
    assert apart <= tolerance
    best, second = stock_run.logits.topk(2).values.unbind(-1)
    decided = best - second > tolerance
    share, variety = decided.float().mean().item(), plugin_run.tokens.unique().numel()
    assert share > 0.5 and variety > TOKENS / 2  # otherwise the comparison of tokens has no meaning
    assert torch.equal(plugin_run.tokens[decided], stock_run.logits.argmax(-1)[decided])
