"""The target as a teacher: its whole self in memory, and its chat template's openings."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from bough.distill.rows import NAME, Placed, Store
from bough.errors import ConfigError
from bough.model.checkpoint import Checkpoint
from bough.model.experts import Experts
from bough.model.layers import working_layers
from bough.model.loading import DTYPES, Skeleton, bind_all, build_skeleton
from bough.tokenizer import Tokenizer

MARKS = ("bough", "tree")  # two user messages: what their conversations share is the template's


class Template(NamedTuple):
    """The tokens of a conversation of one turn, but for what is said."""

    opening: tuple[int, ...]  # up to where the user speaks
    handover: tuple[int, ...]  # from where the user ends to where the assistant speaks
    ends: frozenset[int]  # tokens that end a turn

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Template:
        """Found by rendering it.

        Raises:
            InvalidRequest: the model has no chat template.
        """
        one, other = (tokenizer.encode_chat([("user", mark)]) for mark in MARKS)
        opening, handover = _shared(one, other), _shared(one[::-1], other[::-1])[::-1]
        return cls(tuple(opening), tuple(handover), frozenset((*tokenizer.files.eos_token_ids, handover[0])))


def _shared(one: list[int], other: list[int]) -> list[int]:
    """What two sequences begin with."""
    count = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:count]


class Network:
    """A model with some of its layers, run on rows."""

    def __init__(self, checkpoint: Checkpoint, dropped: tuple[int, ...], dtype: str, device: torch.device) -> None:
        """`dropped` are counted without identity copies.

        Raises:
            CheckpointError: the checkpoint is damaged.
            ConfigError: its architecture cannot be distilled.
        """
        working = working_layers(checkpoint)
        self.kept = tuple(index for index in range(len(working)) if index not in set(dropped))
        skeleton = build_skeleton(checkpoint, DTYPES[dtype], tuple(working[index] for index in self.kept))
        if any(isinstance(slot.source, Experts) for slots in skeleton.layer_slots for slot in slots):
            raise ConfigError(
                f"TARGET: {checkpoint.folder.name} has experts; only dense models can be distilled so far"
            )
        bind_all(skeleton, device)
        skeleton.model.config._attn_implementation = NAME
        self.skeleton: Skeleton = skeleton
        self.device = device
        self.head = skeleton.model.get_output_embeddings()

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, of which some may be taken out."""
        layers: nn.ModuleList = self.skeleton.model.get_decoder().layers
        return layers

    def hidden(self, placed: Placed, store: Store | None = None) -> torch.Tensor:
        """(num_rows, num_places, hidden_size): what the output head is given."""
        hidden: torch.Tensor = self.skeleton.model.get_decoder()(
            input_ids=placed.tokens,
            position_ids=placed.positions,
            attention_mask=placed.mask,
            use_cache=False,
            store=store,
        ).last_hidden_state
        return hidden

    @torch.inference_mode()
    def require_plain_head(self) -> None:
        """Makes sure that logits are the output head's product and nothing else.

        Raises:
            ConfigError: the architecture scales or caps them.
        """
        tokens = torch.zeros((1, 2), dtype=torch.long, device=self.device)
        placed = Placed(
            tokens, torch.arange(2, device=self.device)[None], torch.ones(1, 1, 2, 2, device=self.device).tril().bool()
        )
        logits = self.skeleton.model(
            input_ids=tokens, position_ids=placed.positions, attention_mask=placed.mask, use_cache=False
        ).logits
        if not torch.allclose(self.head(self.hidden(placed)).float(), logits.float(), rtol=1e-2, atol=1e-2):
            raise ConfigError(
                f"TARGET: {self.skeleton.describe()} does more to its logits than can be distilled so far"
            )
