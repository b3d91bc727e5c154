"""The target as a teacher: its whole self in memory, and its chat template's openings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from bough.distill.loss import capped, logit_cap, top_loss
from bough.distill.rows import NAME, Placed, Store
from bough.errors import ConfigError, InvalidRequest
from bough.model.checkpoint import Checkpoint
from bough.model.layers import working_layers
from bough.model.loading import DTYPES, Skeleton, bind_all, build_skeleton
from bough.tokenizer import Tokenizer, TokenizerFiles

MARKS = ("bough", "tree")  # two user messages: what their conversations share is the template's
NUM_SCALED = 8  # tokens, of which one may be padding, that a scale of logits is found with
NEARLY = 0.99  # of a cap, from where on it cannot be told what was capped
ROUNDING = 0.02  # of logits in bfloat16, and of their scale


class Template(NamedTuple):
    """The tokens of a conversation of one turn, but for what is said."""

    opening: tuple[int, ...]  # up to where the user speaks
    handover: tuple[int, ...]  # from where the user ends to where the assistant speaks
    ends: frozenset[int]  # tokens that end an answer, as they do where it is served, and a question too
    num_telling: int  # tokens of the handover by which a question is over: one that is special, otherwise all

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Template:
        """Found by rendering it.

        Raises:
            InvalidRequest: the model has no chat template, or one that does not tell questions from answers.
        """
        one, other = (tokenizer.encode_chat([("user", mark)]) for mark in MARKS)
        opening, handover = _shared(one, other), _shared(one[::-1], other[::-1])[::-1]
        if not handover:
            raise InvalidRequest("chat: this model's chat template puts nothing between a question and its answer")
        num_telling = 1 if handover[0] in _special_ids(tokenizer) else len(handover)
        return cls(tuple(opening), tuple(handover), frozenset(tokenizer.files.eos_token_ids), num_telling)

    @property
    def never_first(self) -> frozenset[int]:
        """Tokens that end a question which has just begun."""
        return self.ends | frozenset(self.handover[:1] if self.num_telling == 1 else ())

    def num_said(self, question: Sequence[int]) -> int:
        """Tokens of the handover, from its first on, that a question ends with."""
        longest = min(len(self.handover), len(question))
        return next((n for n in range(longest, 0, -1) if tuple(question[-n:]) == self.handover[:n]), 0)


def template_fingerprint(files: TokenizerFiles) -> str:
    """Hash over what spells conversations: the template itself and not what it gives, in which may be today's date."""
    told = (files.chat_template, files.eos_token_ids, files.fingerprint)
    return hashlib.blake2b(repr(told).encode(), digest_size=12).hexdigest()


def _special_ids(tokenizer: Tokenizer) -> set[int]:
    """Tokens that no text is made of."""
    added = json.loads(tokenizer.files.tokenizer_json).get("added_tokens") or ()
    return {int(token["id"]) for token in added if token["special"]}


def _shared(one: list[int], other: list[int]) -> list[int]:
    """What two sequences begin with."""
    count = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:count]


def kept_beside(dropped: Collection[int], num_layers: int) -> tuple[int, ...]:
    """The layers that are left, counted without identity copies."""
    return tuple(index for index in range(num_layers) if index not in set(dropped))


def build_part(checkpoint: Checkpoint, dropped: tuple[int, ...], dtype: str) -> Skeleton:
    """A model without some of its layers, which are counted without identity copies, on the meta device.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    working = working_layers(checkpoint)
    kept = tuple(working[index] for index in kept_beside(dropped, len(working)))
    return build_skeleton(checkpoint, DTYPES[dtype], kept)


class Network:
    """A model with some of its layers, run on rows."""

    def __init__(self, checkpoint: Checkpoint, dropped: tuple[int, ...], dtype: str, device: torch.device) -> None:
        """`dropped` are counted without identity copies.

        Raises:
            CheckpointError: the checkpoint is damaged.
            ConfigError: its architecture cannot be distilled.
        """
        skeleton = build_part(checkpoint, dropped, dtype)
        bind_all(skeleton, device)
        skeleton.model.config._attn_implementation = NAME
        self.skeleton: Skeleton = skeleton
        self.kept = kept_beside(dropped, len(working_layers(checkpoint)))
        self.device = device
        self._head = skeleton.model.get_output_embeddings()
        self._cap = logit_cap(skeleton.config)
        self._scale = 1.0
        self._scale = self._logit_scale()

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, of which some may be taken out."""
        layers: nn.ModuleList = self.skeleton.model.get_decoder().layers
        return layers

    def hidden(self, placed: Placed, store: Store | None = None) -> torch.Tensor:
        """(num_rows, num_places, hidden_size): of it the output head makes logits, also where these are scaled."""
        if store is not None:
            store.place(placed.positions)
        hidden: torch.Tensor = self.skeleton.model.get_decoder()(**_input(placed), store=store).last_hidden_state
        return hidden if self._scale == 1.0 else self._scale * hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., vocab_size) of what `hidden` gives."""
        return capped(self._head(hidden), self._cap)

    def loss(self, hidden: torch.Tensor, top_ids: torch.Tensor, top_log_probs: torch.Tensor) -> torch.Tensor:
        """`bough.distill.loss.top_loss` of this network, hidden (places, hidden_size)."""
        return top_loss(hidden, self._head.weight, top_ids, top_log_probs, getattr(self._head, "bias", None), self._cap)

    @torch.inference_mode()
    def _logit_scale(self) -> float:
        """What the output head's product is multiplied by."""
        tokens = torch.arange(NUM_SCALED, device=self.device)[None]
        mask = torch.ones(1, 1, NUM_SCALED, NUM_SCALED, device=self.device).tril().bool()
        placed = Placed(tokens, tokens, mask)
        logits = self.skeleton.model(**_input(placed)).logits.float()
        product = self._head(self.hidden(placed)).float()
        is_told = logits.abs() < NEARLY * self._cap if self._cap else torch.ones_like(logits, dtype=torch.bool)
        before, product_told = logits[is_told], product[is_told]
        if self._cap:
            before = self._cap * torch.atanh(before / self._cap)
        scale = float((before * product_told).sum() / product_told.square().sum()) if len(before) else 1.0
        if (capped(scale * product, self._cap) - logits).norm() > ROUNDING * logits.norm():
            raise ConfigError(
                f"TARGET: {self.skeleton.describe()} does more to its logits than scale or cap them, which cannot be "
                "distilled so far"
            )
        return 1.0 if abs(scale - 1.0) < ROUNDING else scale


def _input(placed: Placed) -> dict[str, Any]:
    """As transformers' models take rows, and hand on to `bough.distill.rows.row_attention`."""
    return {
        "input_ids": placed.tokens,
        "position_ids": placed.positions,
        "attention_mask": placed.mask,
        "use_cache": False,
        "placed": placed,
    }
