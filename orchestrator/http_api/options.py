"""From a request's fields to the arguments of `Requests.generate`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from http import HTTPStatus
from typing import NamedTuple, TypeVar

from bough.protocol.codec_checks import require_numbers
from bough.protocol.generation import Constraint, GenerateOptions, Prompt, Speculation, TextPrompt
from bough.protocol.sampling_params import MAX_SEED
from orchestrator.http_api.errors import ApiError, invalid
from orchestrator.http_api.fields import RequestFields, SpeculationFields

MAX_CHOICES = 128  # limit of choices over all prompts of a request
Value = TypeVar("Value")
_SEED_RANGE = MAX_SEED + 1
_LOWEST_SEED = -(2**63)  # OpenAI's seeds are signed


class RequestedOutput(NamedTuple):
    """One of the requests that an HTTP request is split into; becomes one choice of the answer."""

    prompt: Prompt
    options: GenerateOptions


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the APIs spell differently of a request's limits."""

    max_tokens: int
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_choices: int | None = None  # of each prompt
    constraint: Constraint | None = None


def choices(
    fields: RequestFields,
    prompts: tuple[Prompt, ...],
    limits: RequestLimits,
    answer_id: str,
    session_id: str,
    most_at_once: int = MAX_CHOICES,
) -> tuple[RequestedOutput, ...]:
    """The requests, prompt by prompt; no more than could ever run and wait at once.

    Raises:
        ApiError, InvalidRequest: names the invalid field.
    """
    num = _num_choices(limits.num_choices, len(prompts), most_at_once)
    if session_id and num * len(prompts) > 1:
        raise invalid("session_id", session_id, "be left out with several choices, as each is a session of its own")
    seed = _seed(fields.seed)
    wanted: list[RequestedOutput] = []
    for prompt in prompts:
        for index in range(num):
            name = answer_id if not wanted else f"{answer_id}-{len(wanted)}"
            wanted.append(
                RequestedOutput(prompt, _options(fields, limits, name, session_id, _derived_seed(seed, index)))
            )
    require_numbers(TextPrompt(""), wanted[0].options)  # prompts are checked against the vocabulary later
    return tuple(wanted)


def _num_choices(num: int | None, num_prompts: int, most_at_once: int) -> int:
    """Choices of each prompt. Raises ApiError naming the field that is too large for the limits."""
    num, most = 1 if num is None else num, min(MAX_CHOICES, most_at_once)
    why = "" if most == MAX_CHOICES else f", as {most} requests may run and wait at once and each choice is one"
    if num_prompts > most:
        message = f"prompt: must have at most {most} entries{why}, got {num_prompts}"
        raise ApiError(HTTPStatus.BAD_REQUEST, message, param="prompt")
    if not 1 <= num <= MAX_CHOICES:
        raise invalid("n", num, f"be 1 to {MAX_CHOICES}")
    if num * num_prompts > most:
        beside = f" with {num_prompts} prompts" if num_prompts > 1 else ""
        raise invalid("n", num, f"be at most {most // num_prompts}{beside}{why}")
    return num


def _options(
    fields: RequestFields, limits: RequestLimits, request_id: str, session_id: str, seed: int | None
) -> GenerateOptions:
    defaults = GenerateOptions()
    return GenerateOptions(
        request_id=request_id,
        session_id=session_id,
        temperature=_given(fields.temperature, defaults.temperature),
        top_k=0 if fields.top_k == -1 else _given(fields.top_k, defaults.top_k),  # vLLM's spelling of "off"
        top_p=_given(fields.top_p, defaults.top_p),
        min_p=_given(fields.min_p, defaults.min_p),
        seed=seed,
        repetition_penalty=_given(fields.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_given(fields.presence_penalty, defaults.presence_penalty),
        frequency_penalty=_given(fields.frequency_penalty, defaults.frequency_penalty),
        logit_bias=_logit_bias(fields.logit_bias or {}),
        max_tokens=limits.max_tokens,
        min_tokens=fields.min_tokens or 0,
        include_stop=bool(fields.include_stop_str_in_output),
        stop=fields.stop,
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        logprobs=limits.logprobs,
        prompt_logprobs=limits.prompt_logprobs,
        speculation=_speculation(fields.speculation or SpeculationFields()),
        model=fields.model or "",
        cache_salt=fields.cache_salt or "",
        constraint=limits.constraint,
    )


def _given(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def _seed(seed: int | None) -> int | None:
    """The seed as an unsigned number, distinct for each of OpenAI's."""
    if seed is None:
        return None
    if not _LOWEST_SEED <= seed <= MAX_SEED:
        raise invalid("seed", seed, f"be {_LOWEST_SEED} to {MAX_SEED}")
    return seed % _SEED_RANGE


def _derived_seed(seed: int | None, index: int) -> int | None:
    """The seed of a choice; the first has the request's own, so that it equals a request for one choice."""
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


def _speculation(fields: SpeculationFields) -> Speculation:
    return Speculation(
        disabled=fields.enabled is False,
        budget=fields.budget,
        width=fields.width,
        depth=fields.depth,
        lookup=fields.lookup,
    )
