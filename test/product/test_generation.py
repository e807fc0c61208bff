"""A model nobody wrote for us: Hugging Face's Llama, unmodified, generates with the plugin what it does without."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from llama import VOCABULARY, new_llama, transformers
from standin import Road
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

TOKENS, LAYERS, BATCH = 32, 2, 2
# Large weights, so that attention picks keys and texts wander; with the usual 0.02 one token is repeated for ever.
INITIALIZER_RANGE = 0.08
# A scale that is wrong by 2 % moves the logits by 3 spreads, a key left out by 16, a wrong row of V by 40.
SPREAD_FACTOR = 2
# FA2 takes no mask, the efficient one no groups of heads: together they serve every call, as math does.
OTHER_BACKENDS = ([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], [SDPBackend.MATH])

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "no_autograd_cache")


class Way(NamedTuple):
    """How a text is generated."""

    cache: str  # "dynamic": as long as the text, no mask; "static": as long as it may get, with one
    compiled: str  # "nothing", "layers" (each on its own) or "model" (by transformers itself)
    prompt: int


class Generated(NamedTuple):
    tokens: Tensor  # (BATCH, TOKENS)
    logits: Tensor  # (BATCH, TOKENS, VOCABULARY)


class Follow(transformers.LogitsProcessor):
    """Leads along a text, whatever the logits say of it."""

    def __init__(self, tokens: Tensor, prompt: int):
        self.tokens, self.prompt = tokens, prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = self.tokens[:, input_ids.shape[1] - self.prompt, None]
        return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)


def compile_settings(road: Road, model: nn.Module, compiled: str) -> dict[str, object]:
    """Of generate(), once parts of the model are compiled that are to be."""
    torch._dynamo.reset()  # a graph keeps the attention that it was traced with
    if compiled == "layers":
        for layer in model.model.layers:
            layer.compile(backend="aot_eager", dynamic=True)
    if compiled != "model":
        return {"disable_compile": True}
    if road.device == "cuda":
        return {"compile_config": transformers.CompileConfig()}
    config = transformers.CompileConfig(backend="aot_eager", mode=None)
    config._compile_all_devices = True
    return {"compile_config": config}


def generate(road: Road, way: Way, follow: Tensor | None = None) -> Generated:
    """Greedily, by a new model; or along the tokens of `follow`."""
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"))  # none: a text is as long as it is asked for
    settings = {"initializer_range": INITIALIZER_RANGE, "pad_token_id": 0, **ends}
    model = new_llama(road, layers=LAYERS, hidden_size=256, **settings).eval()
    prompt = torch.randint(VOCABULARY, (BATCH, way.prompt), generator=torch.Generator().manual_seed(1)).to(road.device)
    result = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=TOKENS,
        do_sample=False,
        cache_implementation=way.cache,
        logits_processor=[] if follow is None else [Follow(follow, way.prompt)],
        return_dict_in_generate=True,
        output_logits=True,
        **compile_settings(road, model, way.compiled),
    )
    return Generated(result.sequences[:, way.prompt :], torch.stack(result.logits, dim=1))


def distance(a: Generated, b: Generated) -> float:
    return (a.logits - b.logits).abs().max().item()


def spread_of_stock(road: Road, way: Way, text: Tensor) -> float:
    """How far stock's own backends are apart along a text."""
    eager = way._replace(compiled="nothing")
    default, others = generate(road, eager, text), []
    for backends in OTHER_BACKENDS:
        with sdpa_kernel(backends):
            others.append(generate(road, eager, text))
    return max(distance(default, other) for other in others)


@pytest.mark.parametrize(
    "way",
    [
        Way("dynamic", "nothing", 64),
        Way("dynamic", "nothing", 300),
        Way("dynamic", "layers", 300),
        Way("static", "nothing", 300),
        Way("static", "model", 300),
    ],
    ids=lambda way: "-".join(map(str, way)),
)
def test_llama_generates_alike(road: Road, way: Way) -> None:
    """Every token is the one that stock finds likeliest after the same text, save ties within stock's own roundings.

    All attention is ours, over a static cache too, where F.sdpa is given a mask.
    """
    ours = generate(road, way)
    ran = {path: count for path, count in road.took().items() if path.endswith("_fwd")}
    replayed = road.device == "cuda" and way.compiled == "model"  # of a CUDA graph: counted where it was captured
    assert ran.keys() == {"ours_fwd"} and (replayed or ran["ours_fwd"] == LAYERS * TOKENS)
    with road.off():
        stock = generate(road, way, ours.tokens)
        tolerance = SPREAD_FACTOR * spread_of_stock(road, way, ours.tokens)
    assert road.took() == {} and torch.equal(stock.tokens, ours.tokens)
    apart = distance(ours, stock)
    assert apart <= tolerance
    best, second = stock.logits.topk(2).values.unbind(-1)
    decided = best - second > tolerance
    share, variety = decided.float().mean().item(), ours.tokens.unique().numel()
    assert share > 0.5 and variety > TOKENS / 2  # else tokens tell nothing
    assert torch.equal(ours.tokens[decided], stock.logits.argmax(-1)[decided])
