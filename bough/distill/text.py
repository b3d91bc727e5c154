"""The teacher writes: questions of its own in its chat template's user turn, and its answers to them.

It runs once for each token, and what it thought of the next one is kept as it goes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bough.distill.rows import Placed, Rows, Store
from bough.distill.teacher import Network, Template

NUM_TOP = 32  # next tokens that are kept of what the teacher thinks, and sampled from
NUM_FIRST = 512  # first tokens of a question: it decides what follows, so more of them
FIRST_TEMPERATURE = 1.2  # for variety
NUM_TRIES = 16  # to draw a token that may come first, before others are ruled out
QUESTION_TEMPERATURE = 0.8
ANSWER_TEMPERATURES = (0.0, 0.0, 0.5, 0.8)  # equally often; the draft is for greedy answers above all
MAX_QUESTION_TOKENS = 96
QUESTION_SHARE = 4  # a question takes at most this part of a row: every row has an answer
LOOP_TOKENS = 24  # said twice in one answer, it goes round in circles: the answer is over


@dataclass(frozen=True, slots=True)
class Script:
    """How documents are written."""

    template: Template
    max_answer_tokens: int
    max_question_tokens: int = MAX_QUESTION_TOKENS
    answer_temperatures: tuple[float, ...] = ANSWER_TEMPERATURES


class _Document:
    """A conversation that is being written: the tokens that are settled, and whose turn it is."""

    def __init__(self, script: Script, settled: Sequence[int], is_answering: bool, temperature: float) -> None:
        """`settled` is a whole question with the handover, or the first token of a question."""
        self._script = script
        self._settled = deque(settled)
        self._is_answering = is_answering
        self._answer_temperature = temperature
        self._question = list(settled)
        self._answer: list[int] = []
        self._said: set[tuple[int, ...]] = set()

    def next_token(self) -> int:
        """The token to be written next."""
        return self._settled.popleft()

    @property
    def has_choice(self) -> bool:
        """Whether the token after this one is the teacher's to choose."""
        return not self._settled

    @property
    def has_answer(self) -> bool:
        """Whether it is, and part of an answer."""
        return self.has_choice and self._is_answering

    @property
    def temperature(self) -> float:
        return self._answer_temperature if self._is_answering else QUESTION_TEMPERATURE

    def take(self, token: int) -> bool:
        """Settles the token that was chosen; False where the document is over instead."""
        template, ends = self._script.template, token in self._script.template.ends
        if self._is_answering:
            self._answer.append(token)
            if ends or len(self._answer) > self._script.max_answer_tokens or self._is_looping():
                return False
            self._settled.append(token)
            return True
        if not ends:
            self._settled.append(token)
            self._question.append(token)
        num_said = template.num_said(self._question)  # the teacher may have begun to hand over by itself
        is_full = len(self._question) >= self._script.max_question_tokens
        if ends or is_full or num_said >= template.num_telling:
            self._settled.extend(template.handover[num_said:])
            self._is_answering = True
        return True

    def _is_looping(self) -> bool:
        recent = tuple(self._answer[-LOOP_TOKENS:])
        if recent in self._said:
            return True
        if len(recent) == LOOP_TOKENS:
            self._said.add(recent)
        return False


class Writer:
    """Writes rows, all at once, a token at a time."""

    def __init__(self, teacher: Network, script: Script, seed: int) -> None:
        self._teacher = teacher
        self._script = script
        self._generator = torch.Generator().manual_seed(seed)
        self._opening = torch.tensor(script.template.opening)

    def write(self, num_rows: int, length: int, on_place: Callable[[int], object]) -> Rows:
        """Rows full of conversations that the teacher makes up; `on_place` hears the tokens written in each step."""
        return self._write([None] * num_rows, length, on_place)

    def answer(self, questions: Sequence[Sequence[int]], num_tokens: int, on_place: Callable[[int], object]) -> Rows:
        """A row for each question, whose tokens come behind the opening and end with the handover; greedily."""
        return self._write(questions, max(map(len, questions)) + num_tokens, on_place)

    @torch.inference_mode()
    def _write(self, questions: Sequence[Sequence[int] | None], length: int, on_place: Callable[[int], object]) -> Rows:
        num_rows, num_opening = len(questions), len(self._opening)
        store = Store(num_rows, num_opening + length)
        first_values, first_ids = self._open(store, num_rows)
        documents: list[_Document | None] = [
            self._begin(first_values, first_ids) if question is None else _Document(self._script, question, True, 0.0)
            for question in questions
        ]
        rows = _blank(num_rows, length, min(NUM_TOP, self._teacher.skeleton.vocab_size))
        begun = torch.zeros(num_rows, dtype=torch.int32)
        for place in range(length):
            rows.starts[:, place] = begun
            rows.tokens[:, place] = torch.tensor([d.next_token() if d else 0 for d in documents])
            rows.is_answer[:, place] = torch.tensor([d is not None and d.has_answer for d in documents])
            values, ids = self._step(rows, place, store)
            rows.top_log_probs[:, place], rows.top_ids[:, place] = values, ids
            chosen = self._choose(values, ids, [d.temperature if d else 0.0 for d in documents])
            for row, document in enumerate(documents):
                if document is None or (document.has_choice and not document.take(chosen[row])):
                    documents[row] = self._begin(first_values, first_ids) if questions[row] is None else None
                    begun[row] = place + 1
            on_place(num_rows)
        return rows

    def _begin(self, values: torch.Tensor, ids: torch.Tensor) -> _Document:
        """A question's first token, from what the teacher thinks after the opening, (1, NUM_FIRST) each."""
        temperatures, never_first = self._script.answer_temperatures, self._script.template.never_first
        pick = int(torch.randint(len(temperatures), (), generator=self._generator))
        for _ in range(NUM_TRIES):
            if (token := self._choose(values, ids, [FIRST_TEMPERATURE])[0]) not in never_first:
                break
        else:  # it is nearly sure of one that is none
            values = values.masked_fill(torch.isin(ids, torch.tensor(sorted(never_first))), -torch.inf)
            token = self._choose(values, ids, [FIRST_TEMPERATURE])[0]
        return _Document(self._script, (token,), False, temperatures[pick])

    def _open(self, store: Store, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Puts the opening in front of every row; what may follow it, (1, NUM_FIRST) each."""
        count, device = len(self._opening), self._teacher.device
        store.length = count
        tokens = self._opening.to(device).expand(num_rows, count)
        positions = torch.arange(count, device=device).expand(num_rows, count)
        mask = torch.ones(count, count, dtype=torch.bool, device=device).tril().expand(num_rows, 1, count, count)
        hidden = self._teacher.hidden(Placed(tokens, positions, mask), store)
        return self._likeliest(hidden[:1, -1], NUM_FIRST)

    def _step(self, rows: Rows, place: int, store: Store) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the tokens at a place; log-probabilities and ids of what may follow, (num_rows, NUM_TOP) on the CPU."""
        count, device = len(self._opening), self._teacher.device
        starts = rows.starts[:, place, None].to(device)
        store.length = count + place + 1
        key = torch.arange(store.length, device=device)
        mask = (key < count) | (key >= count + starts)
        tokens = rows.tokens[:, place, None].to(device)
        hidden = self._teacher.hidden(Placed(tokens, count + place - starts, mask[:, None, None]), store)
        return self._likeliest(hidden[:, 0], NUM_TOP)

    def _likeliest(self, hidden: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._teacher.logits(hidden)
        values, ids = logits.topk(min(num_top, logits.shape[1]), dim=1)
        total = logits.float().logsumexp(1, keepdim=True)
        return (values.float() - total).cpu(), ids.cpu()

    def _choose(self, log_probs: torch.Tensor, ids: torch.Tensor, temperatures: Sequence[float]) -> list[int]:
        """A token for each row, drawn at its temperature by the largest of logit + T x Gumbel noise."""
        uniform = torch.rand(log_probs.shape, generator=self._generator).clamp_min(1e-10)
        noise = -torch.log(-torch.log(uniform))
        best = (log_probs + torch.tensor(temperatures)[:, None] * noise).argmax(1)
        chosen: list[int] = ids.gather(1, best[:, None])[:, 0].tolist()
        return chosen


def _blank(num_rows: int, length: int, num_top: int) -> Rows:
    shape, top_shape = (num_rows, length), (num_rows, length, num_top)
    return Rows(
        tokens=torch.zeros(shape, dtype=torch.int32),
        starts=torch.zeros(shape, dtype=torch.int32),
        is_answer=torch.zeros(shape, dtype=torch.bool),
        top_ids=torch.zeros(top_shape, dtype=torch.int32),
        top_log_probs=torch.zeros(top_shape, dtype=torch.float16),
    )
