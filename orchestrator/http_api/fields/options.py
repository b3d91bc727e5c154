"""From a request's fields to the arguments of `Requests.generate`, including the constraint of its answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, NamedTuple

from bough.protocol.codec_generation import require_numbers
from bough.protocol.generation import Constraint, GenerateOptions, Prompt, Speculation, TextPrompt
from bough.protocol.sampling_params import MAX_SEED
from bough.tokenization.chat_template import EFFORT
from orchestrator.http_api.fields.errors import ApiError, invalid
from orchestrator.http_api.fields.generation import SAMPLED, GenerationFields, RequestFields, StructuredOutputsFields

MAX_CHOICES = 128  # limit of choices over all prompts of a request
AS_GIVEN = (*SAMPLED, "stop", "ignore_eos", "model", "cache_salt")  # fields with the names of options
LOWEST_SEED = -(2**63)  # OpenAI's seeds are signed
_ANY_OBJECT = Constraint(json_schema='{"type": "object"}', after_reasoning=True)


class RequestedOutput(NamedTuple):
    """One of the requests that an HTTP request is split into; becomes one choice of the answer."""

    prompt: Prompt
    options: GenerateOptions


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of a request whose fields differ between the APIs."""

    max_tokens: int
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_choices: int = 1  # of each prompt
    constraint: Constraint | None = None


def choices(
    fields: RequestFields,
    prompts: tuple[Prompt, ...],
    limits: RequestLimits,
    answer_id: str,
    session_id: str,
    most_at_once: int = MAX_CHOICES,
) -> tuple[RequestedOutput, ...]:
    """The requests, prompt by prompt; at most as many as can run and wait at once.

    Raises ApiError or InvalidRequest naming the invalid field.
    """
    num = _num_choices(limits.num_choices, len(prompts), most_at_once)
    if session_id and num * len(prompts) > 1:
        raise invalid("session_id", session_id, "be left out with several choices, as each is a separate session")
    options, seed = _options(fields, limits, session_id), _seed(fields.seed)
    wanted: list[RequestedOutput] = []
    for prompt in prompts:
        for index in range(num):
            name = answer_id if not wanted else f"{answer_id}-{len(wanted)}"
            scores = limits.prompt_logprobs if index == 0 else None  # the first choice of a prompt scores it for all
            own = replace(options, request_id=name, seed=_derived_seed(seed, index), prompt_logprobs=scores)
            wanted.append(RequestedOutput(prompt, own))
    require_numbers(TextPrompt(""), wanted[0].options)  # prompts are checked against the vocabulary later
    return tuple(wanted)


def template_kwargs(given: Mapping[str, Any], effort: str | None) -> str:
    """Variables of a chat template as JSON; `effort` is added unless the request has it."""
    kwargs = ({} if effort is None else {EFFORT: effort}) | dict(given)
    return json.dumps(kwargs, ensure_ascii=False) if kwargs else ""


def _num_choices(num: int, num_prompts: int, most_at_once: int) -> int:
    """Choices of each prompt. Raises ApiError naming the field that exceeds the limits."""
    most = min(MAX_CHOICES, most_at_once)
    why = "" if most == MAX_CHOICES else f", as {most} requests may run and wait at once and each choice is one"
    if num_prompts > most:
        message = f"prompt: must have at most {most} entries{why}, got {num_prompts}"
        raise ApiError(HTTPStatus.BAD_REQUEST, message, param="prompt")
    if not 1 <= num <= MAX_CHOICES:
        raise invalid("n", num, f"be 1 to {MAX_CHOICES}")
    if num * num_prompts > most:
        with_prompts = f" with {num_prompts} prompts" if num_prompts > 1 else ""
        raise invalid("n", num, f"be at most {most // num_prompts}{with_prompts}{why}")
    return num


def _options(fields: RequestFields, limits: RequestLimits, session_id: str) -> GenerateOptions:
    """The options that all choices of a request share."""
    speculation = fields.speculation
    given = {name: getattr(fields, name) for name in AS_GIVEN}
    if given["top_k"] == -1:  # vLLM's value for "off"
        given["top_k"] = 0
    return GenerateOptions(
        session_id=session_id,
        logit_bias=_logit_bias(fields.logit_bias),
        max_tokens=limits.max_tokens,
        include_stop=fields.include_stop_str_in_output,
        stop_token_ids=frozenset(fields.stop_token_ids),
        logprobs=limits.logprobs,
        speculation=Speculation(not speculation.enabled, **speculation.model_dump(exclude={"enabled"})),
        constraint=limits.constraint,
        **given,
    )


def _seed(seed: int | None) -> int | None:
    """The seed as an unsigned number, distinct for each of OpenAI's."""
    if seed is None:
        return None
    if not LOWEST_SEED <= seed <= MAX_SEED:
        raise invalid("seed", seed, f"be {LOWEST_SEED} to {MAX_SEED}")
    return seed % (MAX_SEED + 1)


def _derived_seed(seed: int | None, index: int) -> int | None:
    """The seed of a choice; the first has the request's own, and so equals a request for one choice."""
    if seed is None or index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    biases = {}
    for name, bias in given.items():
        if not (name.isascii() and name.isdecimal() and len(name) < 11 and str(int(name)) == name):
            raise invalid("logit_bias", name, "have token ids as its keys")
        biases[int(name)] = bias
    return biases


def constraint_of(field: str, kind: str, schema: str | None, request: RequestFields) -> Constraint | None:
    """The constraint in `field`'s type and schema, or in other servers' fields; None leaves the output free.

    Raises ApiError if both have one, or the latter is invalid.
    """
    name, form = request.form
    if form is not None:
        if kind != "text":
            raise invalid(name, sorted(form.model_fields_set), f"be left out with {field}")
        return _of_structure(form)
    if schema is not None:
        return Constraint(json_schema=schema, after_reasoning=True)
    return None if kind == "text" else _ANY_OBJECT


def response_constraint(fields: GenerationFields) -> Constraint | None:
    """The constraint of a chat's or a completion's output. Raises ApiError as `constraint_of`."""
    form = fields.response_format
    schema = None if form.json_schema is None else form.json_schema.json_schema
    return constraint_of("response_format", form.type, schema, fields)


def constraint_names(
    request: RequestFields,
    field: str = "response_format",
    schema: str = "response_format.json_schema.schema",
) -> dict[str, str]:
    """The client's names of `Constraint`'s fields, for error messages."""
    name, form = request.form
    if form is None:
        return {"constraint.json_schema": schema, "constraint": field}
    spelled = {"json_schema": "json", "choices": "choice", "lark": "grammar", "regex": "regex"}
    names = {ours: f"{name}.{theirs}" if name == "structured_outputs" else name for ours, theirs in spelled.items()}
    return {f"constraint.{ours}": field for ours, field in names.items()} | {"constraint": name}


def _of_structure(wanted: StructuredOutputsFields) -> Constraint:
    given = wanted.model_fields_set - ({"json_object"} if wanted.json_object is False else set())
    if len(given) != 1:
        raise invalid(
            "structured_outputs", sorted(given), "have exactly one of json, json_object, regex, choice, grammar"
        )
    if wanted.json_object:
        return _ANY_OBJECT
    return Constraint(wanted.json_schema, wanted.regex, tuple(wanted.choice or ()), wanted.grammar, True)
