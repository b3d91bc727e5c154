"""The decoders of external input, called in this process: each message must be decoded or refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from google.protobuf.message import Message

from bough.errors import BoughError
from bough.pb import draft_pb2, generation_pb2, stage_pb2, target_pb2
from bough.protocol import codec, codec_generation
from bough.protocol.codec_fields import like
from bough.protocol.generation import ChatPrompt, GenerateOptions, Prompt
from bough.protocol.ids import ScopedId
from bough.protocol.sampling_params import SamplingParams, StopConditions
from bough.registry.records import RequestRecord, SessionRecord, WorkerRecord
from bough.rpc.server import decoded
from bough.security.keys import key_in, read_line
from bough.simulation.tokenizer import simulated_tokenizer
from bough.tokenization.tokenizer import Tokenizer
from orchestrator.admission.size_limits import require_size, require_sizes, require_texts
from orchestrator.http_api import chat, completions
from orchestrator.http_api.body import parse
from orchestrator.http_api.fields.errors import ApiError
from orchestrator.http_api.fields.generation import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields
from orchestrator.http_api.fields.options import RequestedOutput, choices, template_kwargs
from orchestrator.http_api.fields.tools import chat_tools, tools_of
from orchestrator.http_api.responses import fields as response_fields
from orchestrator.http_api.responses.answer import repeated
from orchestrator.http_api.responses.fields import ResponseFields
from orchestrator.opening.prompt import next_prompt, whole_prompt
from orchestrator.service import require_lengths
from target_worker.stages import codec as stages_codec
from target_worker.stages.frames import Assembler, Hello, Piece
from tests.fakes.fuzz import ordinary
from tests.fakes.fuzz.mutation import Json, Mutator
from tests.fakes.fuzz.outcomes import Outcomes

VOCAB, MAX_CONTEXT, MAX_NODES = 1000, 2048, 64
MAX_REFUSAL = 4096  # most characters of an error message
REFUSALS = (BoughError, ApiError)
MAX_SECONDS = 5.0  # of the processor, for decoding one message


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder of messages."""

    name: str
    make: Callable[[Mutator], bytes]
    read: Callable[[bytes], object]  # may raise only REFUSALS


def all_layers() -> list[Layer]:
    """All decoders."""
    tokenizer = Tokenizer(simulated_tokenizer())
    grpc = [
        Layer("generate", _messages(*ordinary.GRPC[ordinary.SERVICE + "Generate"]), lambda d: generate(d, tokenizer)),
        Layer("verify", _messages(ordinary.VERIFY), verify),
        Layer("grow", _messages(ordinary.GROW, ordinary.GROW_CHAINS, ordinary.GROW_SHAPE), grow),
        Layer("grown", _messages(ordinary.GROWN), grown),
        Layer("verified", _messages(ordinary.VERIFIED), verified),
        Layer("join", _messages(ordinary.JOIN), join),
        Layer("passed", _messages(ordinary.HELLO, ordinary.PIECE, ordinary.RING_END), passed),
    ]
    http = [
        Layer("chat", _bodies("/v1/chat/completions"), lambda data: chat_body(data, tokenizer)),
        Layer("responses", _bodies("/v1/responses"), lambda data: response_body(data, tokenizer)),
        Layer("completions", _bodies("/v1/completions"), lambda data: completion_body(data, tokenizer)),
        Layer("tokenize", _bodies("/tokenize"), lambda data: tokenize_body(data, tokenizer)),
        Layer("detokenize", _bodies("/detokenize"), lambda data: parse(DetokenizeFields, data)),
    ]
    index = [
        Layer("worker record", _records(_WORKER), WorkerRecord.from_json),
        Layer(
            "session record", _records(_SESSION), lambda data: SessionRecord.from_json(ScopedId("s"), data, _TRANSCRIPT)
        ),
        Layer(
            "request record", _records(_REQUEST), lambda data: RequestRecord.from_json(ScopedId("r"), data, _TRANSCRIPT)
        ),
    ]
    keys = [
        Layer("authorization", _header, lambda data: key_in([data])),
        Layer("line of keys", _records(_KEY), lambda data: read_line("keys", data.decode("latin-1"))),
    ]
    return [*grpc, *http, *index, *keys]


def in_process(num_messages: int, seed: int) -> Outcomes:
    """Give messages to all decoders in turn."""
    outcomes, mutator, layers = Outcomes(), Mutator(seed), all_layers()
    for number in range(num_messages):
        layer = layers[number % len(layers)]
        data = layer.make(mutator)
        began = time.process_time()
        problem = problem_of(layer, data)
        if not problem and time.process_time() - began > MAX_SECONDS:
            problem = f"{layer.name}: a message took more than {MAX_SECONDS:g} s of the processor"
        if problem:
            outcomes.failed(layer.name, problem, data)
        else:
            outcomes.answered(layer.name, data)
    return outcomes


def problem_of(layer: Layer, data: bytes) -> str:
    """The problem with a decoder's behaviour; empty if it returned a value or refused with a short message."""
    try:
        layer.read(data)
    except REFUSALS as exc:
        text = str(exc)
        if not text or len(text) > MAX_REFUSAL:
            return f"{layer.name}: refused in {len(text)} characters: {text[:80]!r}"
        return ""
    except Exception as exc:  # everything else is a finding
        return f"{layer.name}: {type(exc).__name__}: {str(exc)[:200]}"
    return ""


def generate(data: bytes, tokenizer: Tokenizer) -> list[int]:
    """Decode a Generate request, up to where computation would begin."""
    decoded(data, lambda data: require_lengths(data, MAX_CONTEXT))
    message = decoded(data, generation_pb2.GenerateRequest.FromString)
    return opened(*codec_generation.request_from_wire(message), tokenizer)


def opened(prompt: Prompt, options: GenerateOptions, tokenizer: Tokenizer) -> list[int]:
    """The prompt tokens of a valid request."""
    require_texts(prompt, options)
    require_size(prompt, tokenizer, MAX_CONTEXT)
    is_turn = options.continues and isinstance(prompt, ChatPrompt)
    tokens = (next_prompt if is_turn else whole_prompt)(prompt, tokenizer, VOCAB)
    sampling = like(SamplingParams, options, seed=options.seed or 0, grammar="")
    sampling.validate(VOCAB)
    StopConditions(options.max_tokens, options.stop).validate()
    require_sizes(options.speculation, MAX_NODES)
    return tokens


def verify(data: bytes) -> object:
    """Decode a Verify request at a target."""
    message = decoded(data, target_pb2.VerifyRequest.FromString)
    return codec.verify_call_from_wire(message, VOCAB, MAX_NODES)


def grow(data: bytes) -> object:
    """Decode a Grow request at a draft worker."""
    message = decoded(data, draft_pb2.GrowRequest.FromString)
    return codec.grow_call_from_wire(message, VOCAB, MAX_NODES)


def grown(data: bytes) -> object:
    """Decode a draft worker's reply."""
    result = codec.grow_result_from_wire(decoded(data, draft_pb2.GrowReply.FromString))
    result.tree.validate(VOCAB, MAX_NODES)
    return result


def verified(data: bytes) -> object:
    """Decode a target's reply."""
    return codec.verify_result_from_wire(decoded(data, target_pb2.VerifyReply.FromString))


def join(data: bytes) -> object:
    """Decode a stage's call at its head."""
    return stages_codec.join_from_wire(decoded(data, stage_pb2.JoinRequest.FromString))


def passed(data: bytes) -> object:
    """Decode a predecessor's message in a ring."""
    message = stages_codec.passed_from_wire(decoded(data, stage_pb2.PassRequest.FromString))
    if isinstance(message, Hello):
        message.validate()
    return Assembler().add(message) if isinstance(message, Piece) else message


def chat_body(data: bytes, tokenizer: Tokenizer) -> object:
    """Decode a chat completion's body."""
    fields = parse(ChatFields, data)
    tools = chat_tools(fields.tools, fields.tool_choice, allows_several=fields.parallel_tool_calls)
    prompts = (chat.chat_prompt(fields.messages, tools, template_kwargs(fields.chat_template_kwargs, None)),)
    return _opened(choices(fields, prompts, chat.chat_limits(fields), "id", fields.session_id), tokenizer)


def response_body(data: bytes, tokenizer: Tokenizer) -> object:
    """Decode a response's body."""
    fields = parse(ResponseFields, data)
    tools = tools_of(fields.tools, "", fields.tool_choice, allows_several=fields.parallel_tool_calls)
    prompt, _ = response_fields.conversation(fields, tools)
    repeated(fields, tools)
    limits = response_fields.response_limits(fields)
    return _opened(choices(fields, (prompt,), limits, "id", fields.session_id), tokenizer)


def completion_body(data: bytes, tokenizer: Tokenizer) -> object:
    """Decode a text completion's body."""
    fields = parse(CompletionFields, data)
    prompts = tuple(map(completions.text_prompt, fields.prompt))
    limits = completions.completion_limits(fields)
    return _opened(choices(fields, prompts, limits, "id", fields.session_id), tokenizer)


def tokenize_body(data: bytes, tokenizer: Tokenizer) -> object:
    """Decode a body of /tokenize."""
    prompt = completions.tokenized_prompt(parse(TokenizeFields, data))
    return opened(prompt, GenerateOptions(), tokenizer)


def _opened(wanted: Sequence[RequestedOutput], tokenizer: Tokenizer) -> list[int]:
    return opened(wanted[0].prompt, wanted[0].options, tokenizer)


def _messages(*given: Message) -> Callable[[Mutator], bytes]:
    return lambda mutator: mutator.garbage() if mutator.rng.random() < 0.1 else mutator.message(mutator.pick(given))


def _bodies(path: str) -> Callable[[Mutator], bytes]:
    given = ordinary.BODIES[path]
    return lambda mutator: mutator.garbage() if mutator.rng.random() < 0.05 else mutator.body(mutator.pick(given))


def _records(given: Json) -> Callable[[Mutator], bytes]:
    return lambda mutator: mutator.garbage() if mutator.rng.random() < 0.05 else mutator.body(given)


def _header(mutator: Mutator) -> bytes:
    return mutator.changed(b"Bearer sk-bough-" + mutator.garbage(900), b"Basic eA==")


_TOKENS = (5, 6, 7)
_SAMPLED = SamplingParams(seed=3, stop_token_ids=frozenset({4}))
_SESSION: Json = json.loads(SessionRecord(ScopedId("s"), "target", "draft", 1, 2, 2, _TOKENS).to_json())
_REQUEST: Json = json.loads(
    RequestRecord(ScopedId("r"), ScopedId("s"), 1, 2, _TOKENS, _SAMPLED, StopConditions(4, ("x",))).to_json()
)
_WORKER: Json = json.loads(WorkerRecord("target", "target-1", "127.0.0.1:1").to_json())
_TRANSCRIPT = b"".join(token.to_bytes(4, "little") for token in _TOKENS)
_KEY: Json = {"name": "alice", "sha256": "0" * 64, "expires": "2031-01-31T00:00:00Z", "requests": 4}
