"""Training: AdamW on the corrections, a row of text at a time, with checkpoints from which a run goes on exactly."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from tqdm import tqdm

from bough.distill.evaluate import Agreement, agreement
from bough.distill.recipe import Recipe
from bough.distill.rows import Rows
from bough.distill.student import correct
from bough.distill.teacher import Network
from bough.errors import ConfigError
from bough.model.files import replace

CHECKPOINT_NAME = "training.safetensors"
BETAS = (0.9, 0.95)
WARM_UP = 0.03  # of all steps
LAST_RATE = 0.05  # of the highest learning rate
MAX_NORM = 1.0  # of the gradient


class Trainer:
    """A student and its optimizer."""

    def __init__(self, student: Network, opening: torch.Tensor, rows: Rows, recipe: Recipe) -> None:
        self._student = student
        self._opening = opening.to(student.device)
        self._rows = rows
        self._recipe = recipe
        self.parameters = correct(student, recipe.rank, recipe.seed)
        self._optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=recipe.learning_rate, betas=BETAS, weight_decay=0.0
        )
        batch_tokens = recipe.batch_rows * rows.tokens.shape[1]
        self.num_steps = max(1, recipe.tokens // batch_tokens)
        self.step = 0

    @property
    def trained_tokens(self) -> int:
        return self.step * self._recipe.batch_rows * self._rows.tokens.shape[1]

    def tensors(self) -> dict[str, torch.Tensor]:
        """What was trained, as an adapter keeps it: in bfloat16, but for norms."""
        trained = {name: parameter.detach().cpu() for name, parameter in self.parameters.items()}
        return {name: value if name.endswith(".weight") else value.bfloat16() for name, value in trained.items()}

    def run(self, held_out: Rows, check_steps: int, folder: Path, report: Callable[[str], None]) -> Agreement:
        """Trains to the end, from the checkpoint in `folder` where there is one; the agreement at last.

        Every `check_steps` there is a checkpoint, and the agreement with the held-out answers is measured.

        Raises:
            ConfigError: the checkpoint is of another run, the disk is full, or the learning rate is too high.
        """
        self._resume(folder / CHECKPOINT_NAME)
        latest = agreement(self._student, held_out, self._opening)
        report(f"step {self.step} of {self.num_steps}: held-out {latest}")
        row_tokens = self._recipe.batch_rows * self._rows.tokens.shape[1]
        with tqdm(total=self.num_steps * row_tokens, initial=self.trained_tokens, unit="token", desc="training") as bar:
            while self.step < self.num_steps:
                loss = self._train_step()
                if not math.isfinite(loss):
                    raise ConfigError(
                        f"--learning-rate: {self._recipe.learning_rate}; after step {self.step} the loss is no number "
                        "any more; a smaller one and another --out would do"
                    )
                bar.set_postfix_str(
                    f"loss {loss:.3f}, held-out top-1 {latest.top1:.3f}, top-4 {latest.top4:.3f}", False
                )
                bar.update(row_tokens)
                if self.step % check_steps == 0 or self.step == self.num_steps:
                    self._save(folder / CHECKPOINT_NAME)
                    latest = agreement(self._student, held_out, self._opening)
                    report(f"step {self.step} of {self.num_steps}: loss {loss:.3f}, held-out {latest}")
        return latest

    def _train_step(self) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self._recipe.learning_rate * rate(self.step, self.num_steps)
        rows = self._rows.take(self._batch(self.step)).to(self._student.device)
        hidden = self._student.hidden(rows.placed(self._opening))[:, len(self._opening) :]
        loss = self._student.loss(hidden.flatten(0, 1), rows.top_ids.flatten(0, 1), rows.top_log_probs.flatten(0, 1))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.parameters.values(), MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        return float(loss.detach())

    def _batch(self, step: int) -> torch.Tensor:
        """Rows of a step: all rows in a new order, again and again."""
        num_rows, batch = len(self._rows.tokens), self._recipe.batch_rows
        first = step * batch
        picked = []
        for index in range(first, first + batch):
            epoch, place = divmod(index, num_rows)
            generator = torch.Generator().manual_seed(self._recipe.seed + epoch)
            picked.append(int(torch.randperm(num_rows, generator=generator)[place]))
        return torch.tensor(picked)

    def _save(self, file: Path) -> None:
        tensors = {name: parameter.detach() for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            state = self._optimizer.state[parameter]
            tensors |= {f"{name}:{key}": state[key] for key in ("exp_avg", "exp_avg_sq", "step")}
        metadata = {"step": str(self.step), "recipe": json.dumps(asdict(self._recipe))}
        replace(file, lambda partial: save_file(tensors, partial, metadata))

    @torch.no_grad()
    def _resume(self, file: Path) -> None:
        if not file.is_file():
            return
        self._recipe.require_same(file)
        try:
            with safe_open(file, "pt", device=str(self._student.device)) as held:
                for name, parameter in self.parameters.items():
                    parameter.copy_(held.get_tensor(name))
                    self._optimizer.state[parameter] = {
                        key: held.get_tensor(f"{name}:{key}") for key in ("exp_avg", "exp_avg_sq", "step")
                    }
                self.step = int(held.metadata()["step"])
        except (SafetensorError, KeyError, ValueError) as exc:
            raise ConfigError(f"--out: {file} is damaged: {exc}; without it the run begins anew") from exc


def rate(step: int, num_steps: int) -> float:
    """Of the highest learning rate: a warm-up, then a cosine."""
    warm_up = max(1, round(WARM_UP * num_steps))
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, num_steps - warm_up)
    return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * done)) / 2
