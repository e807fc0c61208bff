"""Programs of the demo on several ranks (ranks.py): a divided Llama learns the same as on one device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from ranks import Rank

from torch_flashplug.demo import llama, multi_gpu

RECIPE = multi_gpu.Recipe(multi_gpu.CPU_RECIPE.shape, 64, 4)


def _texts(rank: Rank) -> torch.Tensor:
    return torch.randint(256, (RECIPE.steps, RECIPE.length + 1), generator=torch.Generator().manual_seed(4)).to(
        rank.device
    )


def _train_on_one_device(rank: Rank) -> list[float]:
    model, losses = llama.build(RECIPE.shape, rank.device, multi_gpu.SEED), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=multi_gpu.LEARNING_RATE / RECIPE.shape.width)
    for text in _texts(rank):
        with torch.autocast(rank.device, torch.bfloat16):
            logits = model(text[None, :-1], torch.arange(RECIPE.length, device=rank.device))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), text[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def case_losses(rank: Rank) -> None:
    expected = _train_on_one_device(rank)
    for make in (multi_gpu.ContextParallel, multi_gpu.TensorParallel):
        training = multi_gpu.train(make, rank.mesh(), RECIPE, _texts(rank))
        assert max(abs(a - b) for a, b in zip(training.losses, expected, strict=True)) < 0.03, (
            make,
            training.losses,
            expected,
        )
        assert (
            training.path_counts.get("routed_ours") == RECIPE.steps * RECIPE.shape.layers
            and "routed_stock" not in training.path_counts
        )
        assert "auto" in multi_gpu.shown_scopes(rank.device == "cuda") and training.step_s > 0
