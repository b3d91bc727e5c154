"""Chat templates of families that call tools, as checkpoints have them, shortened; and calls as these write them."""

from __future__ import annotations

import json
from collections.abc import Mapping

HERMES = (
    "{%- if tools %}<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>\n"
    "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>\n{% endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}{% if m.content %}\n{{ m.content }}{% endif %}"
    "{%- for call in m.tool_calls %}\n<tool_call>\n{\"name\": \"{{ call.function.name }}\", \"arguments\": "
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)  # fmt: skip
LLAMA = (
    "{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}"
    "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}"
    "{%- if tools is not none %}Respond in the format {\"name\": function name, \"parameters\": dictionary}.\n"
    "{%- for t in tools %}{{ t | tojson(indent=4) }}\n{% endfor %}{%- endif %}"
    "{%- for m in messages %}{%- if 'tool_calls' in m %}{%- if m.tool_calls | length > 1 %}"
    "{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}"
    "{\"name\": \"{{ m.tool_calls[0].function.name }}\", \"parameters\": "
    "{{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>"
    "{%- elif m.role == 'tool' %}ipython: {{ m.content | tojson }}<|eot_id|>"
    "{%- else %}{{ m.role }}: {{ m.content }}<|eot_id|>{%- endif %}{%- endfor %}assistant: "
)  # fmt: skip
MISTRAL = (
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- if tools is not none and loop.last %}[AVAILABLE_TOOLS] "
    "{{- tools | tojson }}[/AVAILABLE_TOOLS]{%- endif %}[INST]{{ m.content }}[/INST]"
    "{%- elif m.tool_calls is defined %}[TOOL_CALLS] [{%- for call in m.tool_calls %}{{ (call.function | tojson)[:-1] "
    "}}"
    "{%- if call.id | length < 9 %}{{ raise_exception('Tool call IDs should have length >= 9!') }}{%- endif %}"
    ", \"id\": \"{{ call.id[-9:] }}\"}{%- endfor %}]</s>"
    "{%- elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }} by {{ m.name }}[/TOOL_RESULTS]"
    "{%- else %}{{ m.content }}</s>{%- endif %}{%- endfor %}"
)  # fmt: skip
MISTRAL_NAMED = (
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- if tools is not none and loop.last %}[AVAILABLE_TOOLS]"
    "{{- tools | tojson }}[/AVAILABLE_TOOLS]{%- endif %}[INST]{{ m.content }}[/INST]"
    "{%- elif m.tool_calls %}{%- for call in m.tool_calls %}{%- set arguments = call.function.arguments %}"
    "{%- if arguments is not string %}{%- set arguments = arguments | tojson | safe %}{%- endif %}"
    "{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + arguments }}{%- endfor %}</s>"
    "{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{%- endif %}{%- endfor %}"
)
_TOOL_LIST = "{%- if tools %}<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>\n"
QWEN3_CODER = (
    _TOOL_LIST
    + "<tool_call>\n<function=example>\n<parameter=example_1>\nvalue_1\n</parameter>\n</function>\n</tool_call>"
    "{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{%- for call in m.tool_calls %}"
    "{{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}"
    "{%- for key, value in call.function.arguments | items %}{{- '<parameter=' + key + '>\n' }}"
    "{{- value if value is string else value | tojson | safe }}{{- '\n</parameter>\n' }}{%- endfor %}"
    "{{- '</function>\n</tool_call>' }}{%- endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
SEED_OSS = (
    QWEN3_CODER.replace("tool_call>", "seed:tool_call>")
    .replace("key + '>\n'", "key + '>'")
    .replace("{{- '\n</parameter>", "{{- '</parameter>")
)
GLM45 = (
    _TOOL_LIST
    + "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n</tool_call>"
    "{%- endif -%}{%- for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% if m.tool_calls %}\n"
    "{% for tc in m.tool_calls %}\n{%- if tc.function %}\n    {%- set tc = tc.function %}\n{%- endif %}\n"
    "{{ '\n<tool_call>' + tc.name }}\n{% set _args = tc.arguments %}\n{% for k, v in _args.items() %}\n"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v | tojson if v is not string else v }}</arg_value>\n"
    "{% endfor %}\n</tool_call>{% endfor %}\n{% endif %}{%- endfor -%}<|assistant|>"
)
GLM47 = (
    _TOOL_LIST
    + "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value></tool_call>"
    "{%- endif -%}{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}{%- for tc in m.tool_calls %}"
    "{{- '<tool_call>' + tc.function.name -}}{% for k, v in tc.function.arguments.items() %}<arg_key>{{ k }}</arg_key>"
    "<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>{% endfor %}</tool_call>"
    "{%- endfor %}{%- endfor -%}<|assistant|>"
)
HARMONY = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}<|end|>"
    "{%- if tools %}<|start|>developer<|message|># Tools\n\nnamespace functions {\n"
    "{%- for tool in tools %}{{ '// ' + tool.function.description }}\ntype {{ tool.function.name }} = (_: "
    "{{- tool.function.parameters | tojson }}) => any;\n{% endfor %}}<|end|>{% endif %}"
    "{%- set called = namespace(name=none) %}{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{%- if 'tool_calls' in m %}{%- if m.content and m.thinking %}{{ raise_exception('one of both') }}{% endif %}"
    "{%- if m.content or m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.thinking }}"
    "<|end|>{%- endif %}{%- set call = m.tool_calls[0].function %}{%- set called.name = call.name %}"
    "{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    "{{- call.arguments | tojson }}<|call|>"
    "{%- else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{%- elif m.role == 'tool' %}<|start|>functions.{{ called.name }} to=assistant<|channel|>commentary<|message|>"
    "{{- m.content | tojson }}<|end|>"
    "{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{%- endfor %}<|start|>assistant"
)
NO_TOOLS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
KIMI = HERMES.replace("<tool_call>", "<|tool_call_begin|>")
TEMPLATES = {
    "hermes": HERMES,
    "llama3_json": LLAMA,
    "mistral": MISTRAL,
    "mistral_named": MISTRAL_NAMED,
    "qwen3_coder": QWEN3_CODER,
    "seed_oss": SEED_OSS,
    "glm45": GLM45,
    "glm47": GLM47,
}
_TOOL_CALL, _TAGS = ["<tool_call>", "</tool_call>"], ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
TOKENS = {
    "hermes": _TOOL_CALL,
    "llama3_json": ["<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]"],
    "mistral_named": ["[TOOL_CALLS]", "[ARGS]"],
    "qwen3_coder": _TOOL_CALL,
    "seed_oss": ["<seed:tool_call>", "</seed:tool_call>"],
    "glm45": [*_TOOL_CALL, *_TAGS],
    "glm47": [*_TOOL_CALL, *_TAGS],
}
SPECIAL = "llama3_json", "mistral", "mistral_named", "seed_oss"  # whose tokens are no part of decoded text


def written(name: str, *calls: str) -> str:
    """Calls, given as JSON with the key "arguments", as the family's template writes them."""
    if name in ("hermes", "mistral", "llama3_json"):
        match name:
            case "hermes":
                return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
            case "mistral":
                return f"[TOOL_CALLS] [{', '.join(calls)}]"
        return calls[0].replace("arguments", "parameters")
    return ("" if name in ("mistral_named", "glm47") else "\n").join(_named(name, **json.loads(call)) for call in calls)


def _named(format_name: str, name: str, arguments: Mapping[str, object]) -> str:
    if format_name == "mistral_named":
        return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}"
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    if format_name.startswith("glm"):
        line = "\n" if format_name == "glm45" else ""
        tags = "".join(
            f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}" for key, value in values.items()
        )
        return f"<tool_call>{name}{line}{tags}</tool_call>"
    line, kind = ("\n", "") if format_name == "qwen3_coder" else ("", "seed:")
    tags = "".join(f"<parameter={key}>{line}{value}{line}</parameter>\n" for key, value in values.items())
    return f"<{kind}tool_call>\n<function={name}>\n{tags}</function>\n</{kind}tool_call>"
