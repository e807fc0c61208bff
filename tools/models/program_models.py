"""Programs of tools/models/programs.py as data: unmodified transformers models with small random configs.

The module has the scenarios and batches of each model, a function that runs a model once, and a recorder of the
attention calls.

Sizes without influence on attention are small (2 layers, few heads, a vocabulary of 512). Sizes with influence on
attention are realistic: head dims, ratios of heads, lengths. Weights are larger than the usual 0.02, because at these
widths 0.02 would make attention uniform. Every token goes to every expert of an MoE: a rounding error can flip a choice
of experts, and a flipped choice would hide the error of attention.
"""

from __future__ import annotations

import collections
import inspect
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import torch_flashplug
from torch_flashplug.dispatch import bindings
from torch_flashplug.testing import event_time

VOCABULARY, BATCH, SEEDS = 512, 2, 3
FIRST_TOKEN = 4  # tokens below have special meanings: padding, start, ...
NEW_TOKENS = 16  # generated tokens of a greedy sequence
QUICK_LENGTH, QUICK_NEW_TOKENS = 48, 4
# Cycles that the GPU waits while the host queues the timed calls: 6 ms, enough for five calls with gradients.
AHEAD = 12_000_000

Record = dict[str, object]  # one line of JSON
Squares = dict[str, list[float]]  # name of a tensor -> squared distance to the reference, squared norm of the reference


@dataclass(frozen=True, slots=True)
class Scenario:
    """Scenario: a way to run a model."""

    kind: str  # "forward", "train" or "greedy"
    padding: str = ""  # "left" or "right": the second sequence of the batch is shorter
    cache: str = "dynamic"
    compiled: bool = False
    dropout: bool = False  # dropout as in the library's config; scenarios without dropout run in eval(), even "train"


SCENARIOS = {
    "forward": Scenario("forward"),
    "train": Scenario("train"),
    "forward_left": Scenario("forward", "left"),
    "forward_right": Scenario("forward", "right"),
    "train_left": Scenario("train", "left"),
    "train_right": Scenario("train", "right"),
    "train_dropout": Scenario("train", dropout=True),
    "greedy_dynamic": Scenario("greedy"),
    "greedy_left": Scenario("greedy", "left"),
    "greedy_static": Scenario("greedy", cache="static"),
    "compiled_forward": Scenario("forward", compiled=True),
    "compiled_train": Scenario("train", compiled=True),
}
PLAIN = ("forward", "train")
RIGHT = ("forward_right", "train_right")
PADDED = ("forward_left", "train_left", *RIGHT)
DECODE = ("greedy_dynamic", "greedy_static")
COMPILED = ("compiled_forward", "compiled_train")
DROPOUT = ("train_dropout",)
TIMED = ("forward", "train", "train_left", "greedy_dynamic")  # each remaining scenario takes as long as one of these


@dataclass(frozen=True, slots=True)
class Program:
    """Model of the suite: the names of the classes in transformers, the kind of inputs, and the settings."""

    name: str
    family: str  # prefix of the config class, "<family>Config"
    model: str
    inputs: str  # "text", "seq2seq", "mel", "pixels" or "audio"
    scenarios: tuple[str, ...]
    settings: dict[str, object] = field(default_factory=dict)
    length: int = 384  # tokens; samples of audio

    def build(self, device: str) -> nn.Module:
        """Return the model in bf16, with equal random weights in every call.

        Raises:
            LookupError: the installed transformers does not have the model, or the model does not call F.sdpa.
        """
        config_class, model_class = (getattr(transformers, name, None) for name in (f"{self.family}Config", self.model))
        if config_class is None or model_class is None:
            raise LookupError(f"transformers {transformers.__version__} has no {self.model}")
        if not getattr(model_class, "_supports_sdpa", False):
            raise LookupError(f"{self.model} of transformers {transformers.__version__} does not call F.sdpa")
        torch.manual_seed(0)
        config = config_class(**self.settings, attn_implementation="sdpa")
        model = model_class._from_config(config, dtype=torch.bfloat16).to(device).eval()
        if model.can_generate():  # without stop tokens, every sequence gets the requested length
            for name in ("eos_token_id", "forced_eos_token_id", "begin_suppress_tokens", "suppress_tokens"):
                setattr(model.generation_config, name, None)
        return model


WIDTHS = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "initializer_range": 0.06,
    "init_std": 0.06,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _heads(query: int, key: int, dim: int) -> dict[str, object]:
    """Return the settings of model families with the usual config names."""
    width = {"hidden_size": query * dim, "intermediate_size": 2 * query * dim}
    return WIDTHS | width | {"num_attention_heads": query, "num_key_value_heads": key}


def _decoder(name: str, family: str, heads: tuple[int, int, int], *, more: tuple[str, ...] = (), model: str = "",
             length: int = 384, **settings: object) -> Program:  # fmt: skip
    scenarios = (*PLAIN, *PADDED, *DECODE, "greedy_left", *more)
    return Program(name, family, model or f"{family}ForCausalLM", "text", scenarios, _heads(*heads) | settings, length)


def _encoder(name: str, family: str, heads: tuple[int, int, int], *, more: tuple[str, ...] = (), model: str = "",
             length: int = 384, **settings: object) -> Program:  # fmt: skip
    scenarios = (*PLAIN, *PADDED, *more)
    return Program(name, family, model or f"{family}ForMaskedLM", "text", scenarios, _heads(*heads) | settings, length)


def _seq2seq(name: str, family: str, scenarios: tuple[str, ...], inputs: str = "seq2seq", **settings) -> Program:
    stacks = {f"{side}_{field}": n for side in ("encoder", "decoder") for field, n in
              (("layers", 2), ("attention_heads", 8), ("ffn_dim", 1024))}  # fmt: skip
    settings = WIDTHS | stacks | {"d_model": 512, "decoder_start_token_id": 3} | settings
    return Program(name, family, f"{family}ForConditionalGeneration", inputs, scenarios, settings)


def _vision(name: str, family: str, heads: tuple[int, int, int], more: tuple[str, ...] = (), **settings) -> Program:
    settings = _heads(*heads) | {"image_size": 224} | settings
    return Program(name, family, f"{family}Model", "pixels", (*PLAIN, *more), settings)


def _speech(name: str, family: str, heads: tuple[int, int, int], **settings: object) -> Program:
    convolutions = {"conv_dim": (64,) * 7, "num_conv_pos_embedding_groups": 4, "feat_extract_norm": "layer"}
    settings = _heads(*heads) | convolutions | {"apply_spec_augment": False, "layerdrop": 0.0} | settings
    return Program(name, family, f"{family}ForCTC", "audio", (*PLAIN, *RIGHT, *DROPOUT), settings, 64000)


MLA = {
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64, "q_lora_rank": 128,
    "kv_lora_rank": 128, "hidden_size": 512, "n_routed_experts": 4, "num_experts_per_tok": 4, "n_shared_experts": 1,
    "moe_intermediate_size": 256, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
           "shared_expert_intermediate_size": 256}  # fmt: skip
WHISPER = {"num_mel_bins": 80, "max_source_positions": 300, "max_target_positions": 448}

PROGRAMS = {
    program.name: program
    for program in (
        _decoder("llama", "Llama", (8, 2, 64), more=COMPILED),
        _decoder("mistral", "Mistral", (4, 2, 128), length=512),
        _decoder("mistral_window", "Mistral", (4, 1, 128), sliding_window=100),
        _decoder("qwen2", "Qwen2", (8, 2, 64), length=333),
        _decoder("qwen3", "Qwen3", (4, 2, 128), head_dim=128),
        _decoder("phi3", "Phi3", (4, 4, 96), more=COMPILED),
        _decoder("phi", "Phi", (4, 4, 80)),
        _decoder("gemma", "Gemma", (2, 1, 256), head_dim=256),
        _decoder("gemma3", "Gemma3Text", (4, 1, 128), head_dim=256, model="Gemma3ForCausalLM", sliding_window=100,
                 query_pre_attn_scalar=256, layer_types=["sliding_attention", "full_attention"]),
        _decoder("gpt2", "GPT2", (8, 8, 64), more=DROPOUT, model="GPT2LMHeadModel"),
        _decoder("gpt_neox", "GPTNeoX", (4, 4, 96)),
        _decoder("opt", "OPT", (4, 4, 80), ffn_dim=640, word_embed_proj_dim=320),
        _decoder("falcon", "Falcon", (8, 1, 64)),
        _decoder("stablelm", "StableLm", (4, 4, 80), length=200),
        _decoder("cohere", "Cohere", (4, 2, 128)),
        _decoder("olmo2", "Olmo2", (4, 4, 128), length=512),
        _decoder("glm", "Glm", (4, 2, 128), head_dim=128),
        _decoder("granite", "Granite", (8, 2, 64), attention_multiplier=1 / 64),
        _decoder("smollm3", "SmolLM3", (4, 1, 128), length=200),
        _decoder("mixtral", "Mixtral", (4, 1, 128), **EXPERTS),
        _decoder("qwen2_moe", "Qwen2Moe", (4, 4, 128), **EXPERTS),
        _decoder("qwen3_moe", "Qwen3Moe", (4, 1, 128), head_dim=128, **EXPERTS),
        _decoder("deepseek_v2", "DeepseekV2", (4, 4, 128), **MLA),
        _decoder("deepseek_v3", "DeepseekV3", (4, 4, 128), **MLA),
        _encoder("bert", "Bert", (8, 8, 64), more=(*DROPOUT, *COMPILED)),
        _encoder("roberta", "Roberta", (4, 4, 64), length=512, max_position_embeddings=514),
        _encoder("distilbert", "DistilBert", (8, 8, 64), more=DROPOUT, dim=512, hidden_dim=1024),
        _encoder("electra", "Electra", (4, 4, 64), length=200),
        _encoder("modernbert", "ModernBert", (4, 4, 64), layer_types=["full_attention", "sliding_attention"]),
        _encoder("albert", "Albert", (4, 4, 64)),
        _encoder("clip_text", "CLIPText", (8, 8, 64), model="CLIPTextModel", length=77, initializer_factor=2.0),
        _seq2seq("bart", "Bart", (*PLAIN, *PADDED, *DECODE)),
        _seq2seq("mbart", "MBart", (*PLAIN, *PADDED, *DECODE)),
        _seq2seq("t5", "T5", (*PLAIN, *PADDED, *DECODE), num_layers=2, num_decoder_layers=2, num_heads=8, d_ff=1024),
        _seq2seq("whisper", "Whisper", (*PLAIN, *DECODE, *COMPILED), inputs="mel", **WHISPER),
        _vision("vit", "ViT", (4, 4, 64), more=COMPILED, patch_size=16),
        _vision("dinov2", "Dinov2", (4, 4, 64), patch_size=14),
        _vision("clip_vision", "CLIPVision", (4, 4, 80), patch_size=14, initializer_factor=2.0),
        _vision("siglip_vision", "SiglipVision", (4, 4, 72), patch_size=14),
        _speech("wav2vec2", "Wav2Vec2", (4, 4, 64)),
        _speech("hubert", "Hubert", (4, 4, 80)),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Batch:
    """Arguments of a model call, and the output rows to compare (None: all rows). Rows of padding are not compared."""

    arguments: dict[str, Tensor]
    rows: Tensor | None = None
    new_tokens: int = NEW_TOKENS

    def cast(self, dtype: torch.dtype) -> Batch:
        """Return the batch for a model of the given dtype."""
        arguments = {k: v.to(dtype) if v.is_floating_point() else v for k, v in self.arguments.items()}
        return Batch(arguments, self.rows, self.new_tokens)


def new_batch(program: Program, model: nn.Module, scenario: Scenario, seed: int, quick: bool) -> Batch:
    """Return random inputs. Equal seeds give equal inputs."""
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    length = min(program.length, QUICK_LENGTH) if quick and program.inputs != "audio" else program.length

    def tokens(count: int) -> Tensor:
        return torch.randint(FIRST_TOKEN, VOCABULARY, (BATCH, count), generator=generator)

    def noise(*sizes: int) -> Tensor:
        return torch.randn(BATCH, *sizes, generator=generator).to(torch.bfloat16)

    tensors: dict[str, Tensor] = {}
    rows = None
    if program.inputs == "pixels":
        tensors["pixel_values"] = noise(3, 224, 224)
    elif program.inputs == "audio":
        tensors["input_values"] = noise(length)
    elif program.inputs == "mel":
        tensors["input_features"] = noise(80, 600)
    else:
        tensors["input_ids"] = tokens(length)
    if scenario.padding:
        mask = torch.ones(BATCH, length, dtype=torch.long)
        missing = 3 * length // 8
        mask[1, :missing] = 0
        tensors["attention_mask"] = mask.flip(1) if scenario.padding == "right" else mask
        rows = tensors["attention_mask"].bool() if program.inputs == "text" else None
    elif scenario.kind == "greedy" and "input_ids" in tensors:
        tensors["attention_mask"] = torch.ones_like(tensors["input_ids"])  # else guessed from the tokens
    if program.inputs == "audio":
        counts = model._get_feat_extract_output_lengths(torch.tensor([length, length - 3 * length // 8]))
        last = counts[1] if scenario.padding else counts[0]
        rows = torch.arange(int(counts[0])) < torch.stack([counts[0], last])[:, None]
    labelled = (
        scenario.kind != "greedy" and program.inputs != "audio"
    )  # the loss of CTC is noise for an untrained model
    if labelled and "labels" in inspect.signature(model.forward).parameters:
        tensors["labels"] = tensors["input_ids"].clone() if program.inputs == "text" else tokens(min(64, length // 2))
        if rows is not None and program.inputs == "text":
            tensors["labels"][~rows] = -100
    arguments = {name: tensor.to(device) for name, tensor in tensors.items()}
    return Batch(arguments, None if rows is None else rows.to(device), QUICK_NEW_TOKENS if quick else NEW_TOKENS)


@dataclass(frozen=True, slots=True)
class Task:
    """Work of a child process with a program."""

    mode: str  # "alone", "stock_first", "plugin_first" or "times"
    program: str
    scenarios: tuple[str, ...]
    device: str
    quick: bool = False

    def seeds(self, scenario: Scenario) -> range:
        return range(1 if self.quick or scenario.kind == "greedy" or scenario.dropout else SEEDS)

    def batch(self, model: nn.Module, scenario: Scenario, seed: int) -> Batch:
        return new_batch(PROGRAMS[self.program], model, scenario, seed, self.quick)


class CallRecorder(TorchFunctionMode):
    """Recorder of F.sdpa calls: the arguments, whether our kernel served the call, and the reason if not."""

    ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

    def __init__(self, preset: str) -> None:
        super().__init__()
        self.preset = preset or None  # device that explain() assumes for the tensors
        self.calls: list[tuple[dict[str, object], bool]] = []
        self.reasons: collections.Counter[str] = collections.Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        call = dict(zip(self.ARGUMENTS, args)) | (kwargs or {})
        before = bindings.counters()["ours_fwd"]
        out = func(**call)
        served = bindings.counters()["ours_fwd"] > before
        self.calls.append((call, served))
        if not served:
            plan = torch_flashplug.explain(**call, device=self.preset)
            self.reasons[plan.reasons.get("fa3", f"explain() names {plan.backend}, but no kernel of ours ran")] += 1
        return out

    def record(self) -> Record:
        dims = {(call["query"].shape[-1], call["value"].shape[-1]) for call, _ in self.calls}
        dims_text = " ".join(str(d) if d == dv else f"{d}/{dv}" for d, dv in sorted(dims))
        served = sum(served for _, served in self.calls)
        return {"dims": dims_text, "calls": len(self.calls), "served": served, "reasons": dict(self.reasons)}


class ForcedTokens(transformers.LogitsProcessor):
    """Logits processor that forces the given tokens, whatever the logits are."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens.unbind(1)
        self.step = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = self.tokens[self.step][:, None]
        self.step += 1
        return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)


def run(model: nn.Module, scenario: Scenario, batch: Batch, follow: Tensor | None = None) -> dict[str, Tensor]:
    """Run a scenario once, and return the tensors to compare.

    Forward and greedy scenarios return {"output": ...}. Training scenarios return the gradients: each matrix by name,
    and all vectors as a single tensor.
    """
    if scenario.kind == "greedy":
        # Whisper has a special generate() for long audio, which calls the generate() of GenerationMixin.
        result = transformers.GenerationMixin.generate(
            model,
            **batch.arguments,
            max_new_tokens=batch.new_tokens,
            do_sample=False,
            cache_implementation=scenario.cache,
            logits_processor=[] if follow is None else [ForcedTokens(follow)],
            return_dict_in_generate=True,
            output_logits=True,
            disable_compile=True,
        )
        return {"output": torch.stack(result.logits, dim=1)}
    plain = getattr(model, "_orig_mod", model)  # not compiled
    training = scenario.kind == "train"
    no_cache = {"use_cache": False} if training and "use_cache" in inspect.signature(plain.forward).parameters else {}
    with torch.set_grad_enabled(training):
        result = model(**batch.arguments, **no_cache)
        output = result.logits if "logits" in result else result.last_hidden_state
        if not training:
            return {"output": output if batch.rows is None else output[batch.rows]}
        loss = result.loss if "loss" in result else _loss(output)
    loss.backward()
    # For parameters without influence on the loss, eager mode gives no gradient, and a graph may give zeros.
    gradients = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in plain.named_parameters()}
    plain.zero_grad()
    matrices = {name: gradient for name, gradient in gradients.items() if gradient.dim() > 1}
    vectors = [gradient.flatten() for gradient in gradients.values() if gradient.dim() < 2]
    return matrices | {"vectors": torch.cat(vectors)}


def _loss(output: Tensor) -> Tensor:
    """Return a loss for outputs without labels: the projection on a fixed random direction."""
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output.device)
    return (output.float() * direction).mean()


def squares(got: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> Squares:
    result = {}
    for name, expected in reference.items():
        result[name] = [(expected - got[name].float()).square().sum().item(), expected.square().sum().item()]
    return result


def call_key(call: Mapping[str, object]) -> tuple:
    """Return a key that is equal for calls of equal duration."""
    return tuple((k, tuple(v.shape), v.stride(), v.requires_grad) if isinstance(v, Tensor) else (k, v)
                 for k, v in call.items())  # fmt: skip


def attention_ms(call: Mapping[str, object], grad: bool) -> float:
    """Return the device time of a call of F.sdpa, including the backward if a gradient is needed."""
    leaves = {k: v.detach().requires_grad_(v.requires_grad and grad) for k, v in call.items() if isinstance(v, Tensor)}
    inputs = [leaf for leaf in leaves.values() if leaf.requires_grad]
    call = dict(call) | leaves

    def once() -> None:
        out = F.scaled_dot_product_attention(**call)
        if inputs:
            torch.autograd.grad(out, inputs, torch.ones_like(out))

    def window() -> float:
        torch.cuda._sleep(AHEAD)
        return event_time(once, calls=5)

    for _ in range(2):
        once()
    return statistics.median(window() for _ in range(5))  # median, because the host sometimes falls behind
