"""What the student is to learn: the teacher's likeliest next tokens, and what is left for all others together.

With teacher_probs t_k over its top tokens and rest r = 1 - sum t_k, and student_probs s with rest R, the loss at a
place is KL((t, r) || (s, R)). Its gradient by a logit is s - t at the top tokens, s (1 - r / R) at all others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear

CHUNK = 512  # places whose logits are in memory at once
SMALLEST = 1e-6  # of the mass that is left


class _TopLoss(torch.autograd.Function):
    """Makes the gradient by the hidden states at once, so that the logits of a chunk are forgotten with it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        bias: torch.Tensor | None,
        top_ids: torch.Tensor,
        top_log_probs: torch.Tensor,
        cap: float,
    ) -> torch.Tensor:
        total = torch.zeros((), device=hidden.device)
        gradient = torch.empty_like(hidden)
        for begin in range(0, len(hidden), CHUNK):
            part = slice(begin, begin + CHUNK)
            loss, by_logits = _by_logits(
                linear(hidden[part], head, bias), top_ids[part], top_log_probs[part].float(), cap
            )
            total += loss
            gradient[part] = by_logits @ head
        ctx.save_for_backward(gradient)
        ctx.count = len(hidden)
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * (scale / ctx.count), None, None, None, None, None


def _by_logits(
    logits: torch.Tensor, top_ids: torch.Tensor, top_log_probs: torch.Tensor, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss summed over places, and its gradient by the logits, before they are capped, in their data type."""
    whole = capped(logits.float(), cap)
    slope = 1 - (whole / cap).square() if cap else None
    log_total = whole.logsumexp(1, keepdim=True)
    student = whole.gather(1, top_ids) - log_total  # log-probabilities
    teacher = top_log_probs.exp()
    rest = (1 - teacher.sum(1, keepdim=True)).clamp_min(SMALLEST)
    student_rest = (1 - student.exp().sum(1, keepdim=True)).clamp_min(SMALLEST)
    loss = (teacher * (top_log_probs - student)).sum() + (rest * (rest / student_rest).log()).sum()
    gradient = whole.sub_(log_total).exp_().mul_(1 - rest / student_rest)
    gradient.scatter_(1, top_ids, student.exp() - teacher)
    if slope is not None:
        gradient *= slope
    return loss, gradient.to(logits.dtype)


def top_loss(
    hidden: torch.Tensor,
    head: torch.Tensor,
    top_ids: torch.Tensor,
    top_log_probs: torch.Tensor,
    bias: torch.Tensor | None = None,
    cap: float = 0.0,
) -> torch.Tensor:
    """Mean over places: hidden (places, hidden_size), top_* (places, num_top).

    Logits are hidden times head (vocab_size, hidden_size), plus bias (vocab_size,), capped.
    """
    loss: torch.Tensor = _TopLoss.apply(hidden, head, bias, top_ids.long(), top_log_probs, cap)  # type: ignore[no-untyped-call]
    return loss


def logit_cap(config: Any) -> float:
    """What a model caps its logits with, by its configuration; 0 for nothing."""
    return float(getattr(config, "final_logit_softcapping", None) or 0.0)


def capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Logits that are nowhere larger than `cap`, as Gemma 2 has them (arXiv 2408.00118, section 2); 0 is no cap."""
    return cap * torch.tanh(logits / cap) if cap else logits
