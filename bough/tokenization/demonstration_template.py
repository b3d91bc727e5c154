"""The chat template of the demonstration model: SmolLM2-135M-Instruct's own, with tools in Hermes' form.

Without tools it renders what the model's own template renders.
"""

from __future__ import annotations

from pathlib import Path

TEMPLATE_NAME = "chat_template.jinja"
DEMONSTRATION_TEMPLATE = r"""{%- set system = 'You are a helpful AI assistant named SmolLM, trained by Hugging Face' %}
{%- if tools or (messages and messages[0].role != 'system') %}
    {{- '<|im_start|>system\n' }}
    {{- messages[0].content if messages[0].role == 'system' else system }}
    {%- if tools %}
        {{- '\n\nYou can call these functions:\n<tools>' }}
        {%- for tool in tools %}
            {{- '\n' + tool | tojson }}
        {%- endfor %}
        {{- '\n</tools>\n\nTo call one, answer with its name and arguments as JSON:\n<tool_call>\n' }}
        {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- elif message.tool_calls %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {{- message.content or '' }}
        {%- for call in message.tool_calls %}
            {{- '\n' if message.content or not loop.first else '' }}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""


def has_template(folder: Path) -> bool:
    """Whether a demonstration model has this template: one that an earlier version wrote has no tools."""
    file = folder / TEMPLATE_NAME
    return file.is_file() and file.read_text() == DEMONSTRATION_TEMPLATE


def write_template(folder: Path) -> None:
    """Give a demonstration model this template, atomically, as others may read it."""
    partial = folder / f"{TEMPLATE_NAME}.partial"
    partial.write_text(DEMONSTRATION_TEMPLATE)
    partial.replace(folder / TEMPLATE_NAME)
