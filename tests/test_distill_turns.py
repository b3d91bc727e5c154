"""Where questions and answers end, by what a chat template is made of; and how a question is kept short."""

from __future__ import annotations

import shutil
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import save_tokenizer
from test_distill import distilled
from transformers import AutoTokenizer

from bough import chat_template
from bough.distill.rows import Placed, Rows, Store
from bough.distill.teacher import Template, template_fingerprint
from bough.distill.text import Script, Writer
from bough.errors import ConfigError
from bough.model.tokenizer_files import load_tokenizer_files
from bough.tokenizer import Tokenizer

ALPACA = "{% for m in messages %}### {{ m['role'] }}:\n{{ m['content'] }}\n\n{% endfor %}### Response:"
MARKED = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}<|assistant|>"
MARKS = ["<|user|>", "<|end|>", "<|assistant|>"]
VOCAB_SIZE = 270


class Recital:
    """A teacher that says one text, whatever it hears: at each place behind the opening the text's next token."""

    device = torch.device("cpu")
    skeleton = SimpleNamespace(vocab_size=VOCAB_SIZE)

    def __init__(self, template: Template, text: list[int]) -> None:
        self._next = torch.tensor([0] * (len(template.opening) - 1) + text)

    def hidden(self, placed: Placed, store: Store) -> torch.Tensor:
        """(num_rows, num_places, VOCAB_SIZE): what `logits` leaves as it is."""
        said = self._next[placed.positions.clamp_max(len(self._next) - 1)]
        return 100.0 * torch.nn.functional.one_hot(said, VOCAB_SIZE)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def tokenizer_of(folder: Path, template: str, special: list[str]) -> Tokenizer:
    """Of bytes, with these special tokens beside."""
    save_tokenizer(folder)
    fast = AutoTokenizer.from_pretrained(folder)
    fast.add_special_tokens({"additional_special_tokens": special})
    fast.chat_template = template
    fast.save_pretrained(folder)
    return Tokenizer(load_tokenizer_files(folder))


def written(template: Template, text: list[int], length: int, max_question_tokens: int = 40) -> Rows:
    """A row of a teacher that says this, question, handover, answer and all."""
    script = Script(template, 60, max_question_tokens)
    return Writer(Recital(template, text), script, seed=0).write(1, length, lambda _: None)


@pytest.fixture
def alpaca(tmp_path: Path) -> Tokenizer:
    """Its turn marks are text like any other."""
    return tokenizer_of(tmp_path, ALPACA, [])


@pytest.fixture
def marked(tmp_path: Path) -> Tokenizer:
    """Its turn marks are tokens that no text is made of."""
    return tokenizer_of(tmp_path, MARKED, MARKS)


def test_an_answer_may_have_what_a_handover_begins_with(alpaca: Tokenizer) -> None:
    """Answers once ended at the first token of a handover: of this template, at every line's end."""
    template = Template.of(alpaca)
    assert alpaca.decode(template.handover) == "\n\n### Response:"
    question, said = alpaca.encode("why?"), alpaca.encode("one\n\ntwo\n### three")
    end = alpaca.files.eos_token_ids[0]
    asked = [*question, *template.handover]
    teacher = Recital(template, [*asked, *said, end])
    rows = Writer(teacher, Script(template, 60), seed=0).answer([asked], 40, lambda _: None)
    assert rows.tokens[0, len(asked) : len(asked) + len(said)].tolist() == said
    assert rows.top_ids[0, rows.is_answer[0], 0].tolist() == [*said, end]


def test_a_question_ends_with_the_whole_handover(alpaca: Tokenizer) -> None:
    """And with no less: one whose marks are text may have lines. The handover is not said twice."""
    template = Template.of(alpaca)
    question, said = alpaca.encode("a\nb\n\n## c\n"), alpaca.encode("one\n\ntwo")
    text = [*question, *template.handover, *said, alpaca.files.eos_token_ids[0]]
    rows = written(template, text, len(text) - 1)
    assert rows.tokens[0].tolist() == text[:-1]
    assert rows.is_answer[0].nonzero()[0].tolist() == [len(question) + len(template.handover) - 1]
    assert not rows.starts.any(), "one document"


def test_a_question_that_grows_too_long_is_handed_over(alpaca: Tokenizer) -> None:
    """From where the teacher has begun to do so by itself."""
    template = Template.of(alpaca)
    begun = alpaca.encode("abc\n\n#")
    rows = written(template, [*begun, *[50] * 60], 40, max_question_tokens=len(begun))
    asked = alpaca.encode("abc\n\n### Response:")
    assert rows.tokens[0, : len(asked)].tolist() == asked
    assert rows.is_answer[0].nonzero()[0].tolist() == [len(asked) - 1]


def test_the_end_of_a_text_ends_a_question_too(alpaca: Tokenizer) -> None:
    template = Template.of(alpaca)
    rows = written(template, [*alpaca.encode("why?"), alpaca.files.eos_token_ids[0], *[50] * 60], 40)
    asked = alpaca.encode("why?\n\n### Response:")
    assert rows.tokens[0, : len(asked)].tolist() == asked


def test_a_special_mark_ends_a_question_by_itself(marked: Tokenizer) -> None:
    template = Template.of(marked)
    end, opened = template.handover
    question, said = marked.encode("why?"), marked.encode("so")
    rows = written(template, [*question, end, 50, *said, marked.files.eos_token_ids[0]], 10)
    assert rows.tokens[0, :6].tolist() == [*question, end, opened]
    assert rows.is_answer[0].nonzero()[0].tolist() == [5]


def test_a_template_that_tells_the_date_is_the_same_tomorrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Llama's do: text is gone on with after midnight."""
    tokenizer = tokenizer_of(tmp_path, "{{ strftime_now('%d %b') }}" + ALPACA, [])
    before, fingerprint = Template.of(tokenizer), template_fingerprint(tokenizer.files)
    monkeypatch.setattr(chat_template, "datetime", SimpleNamespace(now=lambda: datetime(1999, 12, 31)))
    assert Template.of(tokenizer).opening != before.opening
    assert template_fingerprint(tokenizer.files) == fingerprint


def test_a_question_is_never_empty(marked: Tokenizer) -> None:
    """Neither the end of a text nor a mark that ends a question is its first token."""
    template = Template.of(marked)
    assert template.never_first == {template.handover[0], *marked.files.eos_token_ids}


def test_a_teacher_that_is_sure_of_an_end_writes_questions_all_the_same(marked: Tokenizer) -> None:
    """It was asked for another first token again and again."""
    template = Template.of(marked)
    rows = written(template, [*template.ends, 5], 8)
    assert int(rows.tokens[0, 0]) not in template.never_first


def test_a_model_without_a_chat_template_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "base"))
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=f"TARGET: {folder} has no chat template, .* would do"):
        distilled(folder, tmp_path / "out", "--drop-layers", "2")
    for template in ("{% nonsense %}", "{{ messages[0].content }}"):
        (folder / "chat_template.jinja").write_text(template)
        with pytest.raises(ConfigError, match=f"TARGET: the chat template of {folder} is of no use .* would do"):
            distilled(folder, tmp_path / "out", "--drop-layers", "2")
    assert not (tmp_path / "out").exists()


def test_rows_too_short_for_an_answer_are_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    template = "{{ messages[0].content }}" + "x" * 30
    folder = Path(shutil.copytree(tiny, tmp_path / "wordy"))
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match=r"--row-tokens: 40 .* the 30 tokens .*; 60 or more would do"):
        distilled(folder, tmp_path / "out", "--drop-layers", "2", "--row-tokens", "40")
