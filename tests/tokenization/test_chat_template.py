"""The next turn of a conversation: what is added to the history is what the whole conversation would have had there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bough.config.cache_paths import demonstration_folder
from bough.errors import InvalidRequest
from bough.model.checkpoint.model_places import load_tokenizer_files
from bough.tokenization.chat_template import ChatTemplate
from bough.tokenization.tokenizer import Tokenizer
from bough.tokenization.vocabulary import TokenizerFiles
from loadtest.common.tiny_tokenizer import save_tokenizer

LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ ' [INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
    "{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind."
    "<|im_end|>\n{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The newest Mistral: the system message comes before the last question, at any position.
SYSTEM_LAST = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{% if loop.last and messages[0].role == 'system' %}"
    "{{ messages[0].content }}\n\n{% endif %}{{ m.content }}[/INST]{% elif m.role == 'assistant' %}{{ m.content }}</s>"
    "{% endif %}{% endfor %}"
)
NUMBERED = "{% for m in messages %}{{ loop.index }}. {{ m.content }}\n{% endfor %}"
SYSTEM_FIRST = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}\n{% endfor %}"
    "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
USER_ONLY = "{% for m in messages if m.role == 'user' %}{{ m.content }}\n{% endfor %}"

HISTORY = [("user", "What is a tree?"), ("assistant", "A plant.")]
TURN = [("user", "And a round?")]


@pytest.mark.parametrize("source", [LLAMA_3, MISTRAL, GEMMA, DEFAULT_SYSTEM, SYSTEM_LAST])
def test_a_turn_equals_the_whole_conversations_text_after_the_answer(source: str) -> None:
    template = ChatTemplate(source, "<s>", "</s>")
    whole = template.render([*HISTORY, *TURN])
    assert whole.split("A plant.")[1] == template.render_turn(TURN)
    assert "Be kind" not in template.render_turn(TURN)


def test_any_user_text_is_rendered_quickly() -> None:
    """The mark that an answer is found by was tried one letter after another: a text of a megabyte took hours."""
    text = "Zyx" + "y" * 1_000_000
    template = ChatTemplate(LLAMA_3, "<s>", "</s>")
    assert template.render([*HISTORY, ("user", text)]).endswith("A plant." + template.render_turn([("user", text)]))


def test_any_user_text_is_allowed() -> None:
    """The made-up answer must not be mistaken for something that a user has said."""
    template = ChatTemplate(LLAMA_3, "<s>", "</s>")
    for text in ("Zyx", "Zyxy Zyxyy", "Tsr", "<|eot_id|>"):
        assert template.render([*HISTORY, ("user", text)]).endswith("A plant." + template.render_turn([("user", text)]))


@pytest.mark.parametrize(
    ("source", "messages", "reason"),
    [
        (NUMBERED, TURN, "continues: must be false, .* renders a new turn differently"),
        (SYSTEM_FIRST, [("system", "Be brief."), *TURN], "continues: must be false, .* renders a new turn differently"),
        (USER_ONLY, TURN, "continues: must be false, with the full history"),
        (GEMMA, [("assistant", "I go on."), *TURN], "roles must alternate"),
        ("", TURN, "this model has no chat template"),
    ],
)
def test_a_turn_that_cannot_be_separated_from_the_history_is_refused(
    source: str, messages: list[tuple[str, str]], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        ChatTemplate(source, "<s>", "</s>").render_turn(messages)


@pytest.fixture(scope="module")
def smollm_tokenizer() -> Tokenizer:
    """SmolLM2's own, where the demonstration model is in the user's cache."""
    folder = demonstration_folder(0)
    if not (folder / "tokenizer.json").exists():
        pytest.skip("the demonstration model has not been made: make demo")
    return Tokenizer(load_tokenizer_files(folder))


@pytest.mark.parametrize("system", [[], [("system", "Be brief.")]])
def test_smollm2_tokens_of_a_turn(smollm_tokenizer: Tokenizer, system: list[tuple[str, str]]) -> None:
    """Prompt, answer and new turn joined are token for token the whole conversation; nothing is said twice."""
    tokenizer = smollm_tokenizer
    turn = tokenizer.encode_turn(TURN)
    assert turn[0] in tokenizer.files.eos_token_ids
    prompt = tokenizer.encode_chat([*system, HISTORY[0]])
    joined = [*prompt, *tokenizer.encode_more("A plant."), *turn]
    assert joined == tokenizer.encode_chat([*system, *HISTORY, *TURN])
    assert "You are a helpful" not in tokenizer.decode(turn)


def test_text_that_continues_has_no_second_bos(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    files = load_tokenizer_files(tmp_path)
    tokenizer = Tokenizer(TokenizerFiles(files.tokenizer_json, LLAMA_3, (), "<s>"))
    assert tokenizer.encode_more("and on") == tokenizer.encode("and on")
    assert tokenizer.decode(tokenizer.encode_more("b", before="a")) == "b"


TOOL_USE = "{% for t in tools %}{{ t.name }} {% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("in_config", [True, False])
def test_of_named_templates_the_one_for_tools_is_used_with_tools(tmp_path: Path, in_config: bool) -> None:
    """As transformers chooses; they are listed in the configuration, or are files next to it."""
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(NUMBERED)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_USE)
    if in_config:
        shutil.rmtree(tmp_path / "additional_chat_templates")
        (tmp_path / "chat_template.jinja").unlink()
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        config["chat_template"] = [
            {"name": name, "template": source}
            for name, source in (("default", NUMBERED), ("tool_use", TOOL_USE), ("rag", "{{ documents }}"))
        ]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(load_tokenizer_files(tmp_path))
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.decode(tokenizer.encode_objects(messages, [])) == "1. Hi\n"
    assert tokenizer.decode(tokenizer.encode_objects(messages, [{"name": "sky"}])) == "sky Hi"
    assert tokenizer.decode(tokenizer.encode_chat([("user", "Hi")])) == "1. Hi\n"
