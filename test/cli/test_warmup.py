"""The `warmup` verb: the named kernels must cover the kernels that models need.

No test needs a GPU; a stub replaces the compiler.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers

import torch_flashplug
from torch_flashplug import __main__, env
from torch_flashplug.api import startup
from torch_flashplug.api.backend import DEVICES
from torch_flashplug.cli import model_config, warmup
from torch_flashplug.codegen import compile_pool, jit, kernel_cache
from torch_flashplug.codegen.kernel_request import CallConditions, KernelAnswer
from torch_flashplug.dispatch import bindings, callbacks, kernel_sets, packs
from torch_flashplug.registry.kernel_spec import KernelSpec

H100 = DEVICES["h100"]
SMALL = {"num_hidden_layers": 1, "vocab_size": 128, "intermediate_size": 64}
DECODERS = {
    "llama": lambda: (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, **SMALL),
    ),
    "mistral": lambda: (
        transformers.MistralForCausalLM,
        transformers.MistralConfig(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, sliding_window=64,
                                   **SMALL),
    ),
    "qwen3": lambda: (
        transformers.Qwen3ForCausalLM,
        transformers.Qwen3Config(hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, **SMALL),
    ),
    "gemma3": lambda: (
        transformers.Gemma3ForCausalLM,
        transformers.Gemma3TextConfig(hidden_size=1152, num_attention_heads=4, num_key_value_heads=1, head_dim=256,
                                      sliding_window=64, **SMALL),
    ),
    "phi3": lambda: (
        transformers.Phi3ForCausalLM,
        transformers.Phi3Config(hidden_size=3072, num_attention_heads=32, pad_token_id=0, **SMALL),
    ),
    "gpt2": lambda: (transformers.GPT2LMHeadModel, transformers.GPT2Config(n_layer=1, vocab_size=128)),
    "deepseek": lambda: (
        transformers.DeepseekV3ForCausalLM,
        transformers.DeepseekV3Config(hidden_size=512, num_attention_heads=16, num_key_value_heads=16, q_lora_rank=64,
                                      kv_lora_rank=64, first_k_dense_replace=1, **SMALL),
    ),
    "neox": lambda: (
        transformers.GPTNeoXForCausalLM,
        transformers.GPTNeoXConfig(hidden_size=512, num_attention_heads=8, **SMALL),
    ),
}  # fmt: skip
ENCODERS = {
    "bert": lambda: (transformers.BertModel, transformers.BertConfig(**SMALL)),
    "vit": lambda: (transformers.ViTModel, transformers.ViTConfig(num_hidden_layers=1, intermediate_size=64)),
    "clip": lambda: (
        transformers.CLIPVisionModel,
        transformers.CLIPVisionConfig(num_hidden_layers=1, intermediate_size=64),
    ),
}
WHISPER = {
    "whisper": lambda: (
        transformers.WhisperForConditionalGeneration,
        transformers.WhisperConfig(encoder_layers=1, decoder_layers=1, vocab_size=128, d_model=384,
                                   encoder_attention_heads=6, decoder_attention_heads=6, encoder_ffn_dim=64,
                                   decoder_ffn_dim=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                                   decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None),
    ),
}  # fmt: skip


@pytest.fixture
def requested_kernels() -> Iterator[list[str]]:
    """Record the kernels requested by calls on CPU tensors, as on an H100 with empty packs. Stock serves the calls."""
    names: list[str] = []

    def record(name: str, cc: int, circumstances: CallConditions) -> KernelAnswer:
        names.append(name)
        return KernelAnswer(reason="recorded", may_change=True)

    startup.load()
    bindings.set_facts_override(H100)
    bindings.set_cpu_stub(2)
    bindings.clear_packs()
    callbacks.set_compile_callback(record)
    bindings.register_ops("CPU")
    startup.push_tables()
    torch._fused_sdp_choice(*torch.empty(3, 1, 1, 8, 8).unbind())  # resolves the CPU entry of the choice stub of torch
    torch_flashplug.enable()
    assert bindings.install(bindings.CPU_SLOT) == 0, bindings.last_error()
    yield names
    bindings.uninstall(bindings.CPU_SLOT)
    bindings.set_cpu_stub(False)
    bindings.set_facts_override(None)
    bindings.unregister_ops()
    bindings.register_ops("CUDA")
    callbacks.set_compile_callback(startup.provide)
    packs.register()
    startup.push_tables()


def run_decoder(model: torch.nn.Module) -> None:
    for batch, length in ((1, 17), (2, 130), (1, 300)):
        ids = torch.randint(3, 100, (batch, length))
        padded = torch.ones_like(ids)
        padded[0, :5] = 0
        for mask in (torch.ones_like(ids), padded):
            model(input_ids=ids, attention_mask=mask)
            if not model.training:
                model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0)


def run_encoder(model: torch.nn.Module) -> None:
    if not hasattr(model.config, "vocab_size"):
        model(pixel_values=torch.randn(2, 3, 224, 224, dtype=torch.bfloat16))
        return
    for length in (17, 130, 300):
        ids = torch.randint(3, 100, (2, length))
        padded = torch.ones_like(ids)
        padded[0, 5:] = 0
        model(input_ids=ids)
        model(input_ids=ids, attention_mask=padded)


def run_whisper(model: torch.nn.Module) -> None:
    features = torch.randn(1, 80, 3000, dtype=torch.bfloat16)
    for length in (3, 100):
        model(input_features=features, decoder_input_ids=torch.randint(3, 100, (1, length)))
    if not model.training:
        model.generate(input_features=features, max_new_tokens=4, do_sample=False)


RUNS: dict[str, tuple[Callable, Callable]] = {
    **{name: (make, run_decoder) for name, make in DECODERS.items()},
    **{name: (make, run_encoder) for name, make in ENCODERS.items()},
    **{name: (make, run_whisper) for name, make in WHISPER.items()},
}


@pytest.mark.parametrize("name", RUNS)
def test_warmup_covers_the_kernels_requested_by_a_model(requested_kernels, tmp_path, name):
    make, run = RUNS[name]
    kind, config = make()
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = kind(config).to(torch.bfloat16)
    config.save_pretrained(tmp_path)
    for training in (False, True):
        requested_kernels.clear()
        with torch.set_grad_enabled(training):
            run(model.train(training))

        warmed = warmup.kernels_of_models([tmp_path], H100, training=training, dtype="bf16")

        assert requested_kernels and set(requested_kernels) <= set(warmed), set(requested_kernels) - set(warmed)
        assert len(warmed) <= 14  # unused guesses cost time


LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
CONFIGS = {
    "llama": (LLAMA, [(128, 128)], True),
    "heads_of_their_own": (LLAMA | {"head_dim": 64}, [(64, 64)], True),
    "mla": (LLAMA | {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}, [(192, 128)], True),
    "two_head_dims": (LLAMA | {"head_dim": 128, "global_head_dim": 256}, [(128, 128), (256, 256)], True),
    "parts": ({"text_config": LLAMA, "vision_config": {"hidden_size": 1152, "num_heads": 16, "patch_size": 14}},
              [(128, 128), (72, 72)], None),
    "gpt2": ({"model_type": "gpt2", "n_embd": 768, "n_head": 12}, [(64, 64)], True),
    "bert": ({"model_type": "bert", "hidden_size": 768, "num_attention_heads": 12}, [(64, 64)], False),
    "diffusers": ({"_class_name": "FluxTransformer2DModel", "attention_head_dim": 128, "num_attention_heads": 24},
                  [(128, 128)], False),
    "lists": ({"_class_name": "UNet", "attention_head_dim": [64], "num_attention_heads": [5, 10]}, [(64, 64)], False),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_are_read(name):
    config, dims, decodes = CONFIGS[name]
    layers = model_config.attentions(config)
    assert [layer.dims for layer in layers] == dims
    assert decodes is None or {layer.has_decode_calls for layer in layers} == {decodes}


@pytest.mark.parametrize(
    ("config_dtype", "dtype"), [("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "bf16"), (None, "bf16")]
)
def test_dtype_of_the_configuration_is_used(config_dtype, dtype):
    assert {layer.dtype for layer in model_config.attentions(LLAMA | {"torch_dtype": config_dtype})} == {dtype}
    assert {layer.dtype for layer in model_config.attentions(LLAMA | {"torch_dtype": config_dtype}, dtype="fp16")} == {
        "fp16"
    }


INVALID_CONFIGS = {
    "no_file": (None, "a model's folder, but got .*: "),
    "no_json": ("{", "a model's folder, but got .*: "),
    "a_list": ("[]", "holds list"),
    "no_heads": ("{}", "name attention heads"),
}


@pytest.mark.parametrize("name", INVALID_CONFIGS)
def test_invalid_configuration_files_are_reported(tmp_path, name):
    text, message = INVALID_CONFIGS[name]
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"^--model-config must .*{message}"):
        model_config.attentions(model_config.read(tmp_path / "config.json"))


def run_warmup(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-m", "torch_flashplug", "warmup", *map(str, words)],
        capture_output=True, text=True, check=False, env=os.environ | variables,
    )  # fmt: skip


def test_list_prints_only_kernel_names(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    log = tmp_path / "log"
    log.write_text("plan: fwd_sm90_bf16_d64_full_m64n128s2 x\nfwd_sm90_bf16_d64_full_m64n128s2, fwd_sm90_nonsense\n")
    words = ("--model-config", tmp_path, "--shapes", "1,16,512,64", "1,16,512,64", "--from-log", log, "--list")
    names = run_warmup(*words, "--device", "h100").stdout.split()
    assert len(names) == len(set(names)) == 7  # the kernel of the shapes is also in the log
    assert all(KernelSpec.from_name(name).name() == name for name in names)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "at least one of --model-config, --shapes and --from-log must be given"),
        (("--shapes", "1,16,512,64"), "--shapes must be 2 or 3 shapes"),
        (("--from-log", "/nowhere"), "--from-log must be a readable file, but got /nowhere: "),
        (("--model-config", "/nowhere"), "--model-config must be a config.json"),
        (("--shapes", "1,16,512,64", "1,16,512,64", "--device", "h1000"), "--device must be one of h100"),
        (("--shapes", "1,16,512,64", "1,16,512,64", "--dtype", "fp32"), "no torch_flashplug kernel serves these calls"),
        (("--shapes", "1,16,512,64", "1,16,512,64", "--out", "/dev/null/x"),
         "--out must be a writable folder, but got /dev/null/x: "),
    ],
)  # fmt: skip
def test_bad_options_end_with_one_line(words, message):
    with pytest.raises(SystemExit) as end:
        __main__.main(["warmup", *words])
    assert message in str(end.value) and "\n" not in str(end.value)


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), 130), (OSError(28, "No space left on device"), "info: No space left")]
)
def test_an_interrupted_command_ends_with_one_line(error, status, monkeypatch):
    def raise_error(options: object) -> None:
        raise error

    monkeypatch.setattr(__main__, "_info", raise_error)
    monkeypatch.setattr(__main__.os, "dup2", lambda *_: None)
    with pytest.raises(SystemExit) as end:
        __main__.main(["info"])
    assert str(end.value.code).startswith(str(status))


@pytest.mark.parametrize("words", [("info",), ("warmup", "--shapes", "1,16,512,64", "1,16,512,64", "--list")])
def test_full_disk_is_reported_in_one_line(words):
    command = [sys.executable, "-m", "torch_flashplug", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1 and done.stderr == f"{words[0]}: No space left on device\n"


def test_closed_output_pipe_is_no_error():
    words = "import runpy, sys; sys.argv[1:] = ['info']; runpy.run_module('torch_flashplug', run_name='__main__')"
    command = f'"{sys.executable}" -c "{words}" | true'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == ""


def test_missing_kernels_are_compiled_once(tmp_path, monkeypatch, capsys):
    """Compile into the requested folder."""

    def compile_kernel(worker: compile_pool.Worker, job: compile_pool.Job, folders: list[Path]) -> dict[str, object]:
        if "full" in job.name:
            return {"path": None, "error": "no"}
        facts = {"name": job.name, "seconds": 1.0, "cpu": []}
        return {"path": kernel_cache.write(folders[0], f"{job.key}.so", b"", facts), "seconds": 1.0}

    monkeypatch.setattr(compile_pool.Worker, "compile", compile_kernel)
    monkeypatch.setenv(env.CACHE_DIR.name, "")
    monkeypatch.setattr(kernel_cache, "_is_exclusive", False)
    warmup.use_folder(tmp_path)
    names = [
        "fwd_sm90_bf16_d64_causal_m64n128s2",
        "fwd_sm90_bf16_d128_causal_m128n128s2",
        "fwd_sm90_bf16_d64_full_m64n128s2",
    ]

    first = warmup.compile_all(names, 90, packs=False)
    second = warmup.compile_all(names[:2], 90, packs=False)

    assert set(first.compiled) == set(names[:2]) and first.failed == {names[2]: "no"} and first.num_present == 0
    assert second.compiled == () and second.num_present == 2
    assert "2 kernels compiled" in warmup.report(first) and f"1 failed. Cache: {tmp_path}" in warmup.report(first)
    assert "[3/3]" in capsys.readouterr().err and all(jit.find_entry(name, "sm_90a") for name in names[:2])


def test_kernels_of_old_versions_are_pruned(tmp_path, monkeypatch):
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    name = "fwd_sm90_bf16_d64_causal_m64n128s2"
    current = kernel_cache.write(tmp_path, jit.compile_job(name, "sm_90a").key + ".so", b"", {"cpu": []})
    kernel_cache.write(tmp_path, f"{name}-0123456789abcdef-sm_90a-x-4.8.1+cu13.so", b"", {"cpu": []})
    kernel_cache.write(tmp_path, "no_kernel-0123456789abcdef-sm_90a-x-4.8.1+cu13.so", b"", {"cpu": []})
    assert warmup.prune() == 2 and current.exists()


def test_cache_miss_lists_the_kernels_of_the_same_model():
    """Use the kernels of Llama, starting from the first kernel of its first prompt."""
    startup.load()
    spec = KernelSpec.from_name("fwd_sm90_bf16_d128_causal_m128n128s2")
    inference = kernel_sets.kernels_needed_next(spec, H100, training=False, deterministic=False)
    training = kernel_sets.kernels_needed_next(spec, H100, training=True, deterministic=True)
    assert {KernelSpec.from_name(name).kind for name in inference} == {"fwd", "decode"}
    assert {KernelSpec.from_name(name).kind for name in training} == {"fwd", "detbwd", "partbwd"}
    window = KernelSpec.from_name("fwd_sm90_bf16_d128_window_m128n128s2")
    assert spec.name() not in kernel_sets.kernels_needed_next(window, H100, training=True, deterministic=False)
