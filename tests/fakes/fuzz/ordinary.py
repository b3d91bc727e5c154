"""Valid messages, from which malformed ones are derived."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from bough.pb import common_pb2, generation_pb2
from bough.protocol import codec
from bough.protocol.ids import ScopedId
from bough.protocol.messages import Context, GrowCall, GrowResult, Timings, Verdict, VerifyCall, VerifyResult
from bough.protocol.sampling_params import SamplingParams
from bough.sizing.stage_split import StageRoom
from bough.trees.tree import Tree
from bough.trees.tree_plan import BestFirst, StaticShape, TreePlan
from target_worker.stages import codec as stages_codec
from target_worker.stages.frames import Hello, Piece, RingEnd
from target_worker.stages.roster import JoinCall, StageFacts, StageFigures

Json = dict[str, Any]

TREE = Tree.of([7, 8, 9, 10], [-1, 0, 0, 2], [0, -1, -2, -1])
SAMPLING = SamplingParams(temperature=0.7, seed=3, logit_bias={5: 1.0}, logprobs=1, stop_token_ids=frozenset({4}))
CONTEXT = Context.of(ScopedId("fuzzed"), [1, 2, 3, 7], 0, 2)

VERIFY = codec.verify_call_to_wire(VerifyCall(CONTEXT, 1, 0, TREE, SAMPLING))
GROW = codec.grow_call_to_wire(GrowCall(CONTEXT, 7, SAMPLING, 0, TreePlan(BestFirst(8, 4, 3))))
GROW_CHAINS = codec.grow_call_to_wire(GrowCall(CONTEXT, 7, SAMPLING, 0, TreePlan(StaticShape.chains(2, 3))))
GROW_SHAPE = codec.grow_call_to_wire(GrowCall(CONTEXT, 7, SAMPLING, 0, TreePlan(StaticShape((0, 0, 1)))))
GROWN = codec.grow_result_to_wire(GrowResult(TREE, 3, Timings()))
VERIFIED = codec.verify_result_to_wire(VerifyResult(Verdict((1,), 5, ()), 3, Timings()))
JOIN = stages_codec.join_to_wire(
    JoinCall(
        "stage",
        "127.0.0.1:7413",
        StageFacts("0.1", "code", "checkpoint", "tokenizer", "float32", "cpu"),
        StageRoom("b", 2**30, 1e9, 0.01),
        StageFigures(4, 8, 2**20, "a CPU"),
    )
)
HELLO = stages_codec.passed_to_wire(Hello(3, ("127.0.0.1:7412", "127.0.0.1:7413"), 1, b"payload"))
PIECE = stages_codec.passed_to_wire(Piece(1, 0, 6, 8, b"header", b"body"))
RING_END = stages_codec.passed_to_wire(RingEnd("stage 1 at 127.0.0.1:7413 ends"))
GENERATE = generation_pb2.GenerateRequest(
    token_ids=generation_pb2.TokenIds(ids=[1, 2, 3]),
    session_id="session",
    request_id="request",
    sampling=common_pb2.SamplingParams(temperature=0.5, seed=1, logit_bias={3: 1.0}),
    max_tokens=3,
    stop=["zz"],
    speculation=generation_pb2.Speculation(budget=4, width=2, depth=2),
)
GENERATE_CHAT = generation_pb2.GenerateRequest(
    chat=generation_pb2.ChatMessages(messages=[generation_pb2.ChatMessage(role="user", content="hi")]), max_tokens=2
)
GENERATE_TEXT = generation_pb2.GenerateRequest(
    text="a few words", max_tokens=2, sampling=common_pb2.SamplingParams(temperature=0.0)
)
GENERATE_RESUME = generation_pb2.GenerateRequest(
    text="words",
    request_id="r",
    sampling=common_pb2.SamplingParams(seed=1),
    resume=generation_pb2.Resume(num_tokens=1, token_ids=[4]),
)
ABORT = generation_pb2.AbortRequest(request_id="request")
CLOSE = generation_pb2.CloseSessionRequest(session_id="session")
DECISIONS = generation_pb2.GetDecisionsRequest(session_id="session")
RELEASE = common_pb2.ReleaseRequest(session_id="fuzzed", epoch=1)

SERVICE = "/bough.v1.Generation/"
HEALTH = "/grpc.health.v1.Health/Check"
Calls = dict[str, tuple[Message, ...]]  # valid messages by method, that of most interest first
GRPC: Calls = {
    SERVICE + "Generate": (GENERATE, GENERATE_CHAT, GENERATE_TEXT, GENERATE_RESUME),
    SERVICE + "Abort": (ABORT,),
    SERVICE + "CloseSession": (CLOSE,),
    SERVICE + "GetDecisions": (DECISIONS,),
    SERVICE + "GetLoads": (generation_pb2.GetLoadsRequest(),),
    SERVICE + "GetModelInfo": (generation_pb2.GetModelInfoRequest(),),
    SERVICE + "GetServerInfo": (common_pb2.GetServerInfoRequest(),),
    SERVICE + "GetAcceptance": (generation_pb2.GetAcceptanceRequest(),),
    HEALTH: (health_pb2.HealthCheckRequest(service="bough.v1.Generation"),),
}
WORK: dict[str, Calls] = {"target": {"Verify": (VERIFY,)}, "draft": {"Grow": (GROW, GROW_CHAINS, GROW_SHAPE)}}
INFO = {"GetServerInfo": (common_pb2.GetServerInfoRequest(),), "GetTokenizer": (common_pb2.GetTokenizerRequest(),)}
OF_WORKERS: dict[str, Calls] = {
    kind: {f"/bough.v1.{kind.title()}/{name}": given for name, given in {**work, "Release": (RELEASE,), **INFO}.items()}
    for kind, work in WORK.items()
}

COMMON_TO_ALL: Json = {
    "model": None, "stream": False, "temperature": 0.5, "top_p": 0.9, "seed": 7,
    "stop": ["zz"], "logit_bias": {"3": 1.5}, "presence_penalty": 0.1, "frequency_penalty": 0.1, "top_k": 4,
    "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "stop_token_ids": [5], "min_tokens": 1,
    "session_id": "session", "cache_salt": "salt",
    "speculation": {"enabled": True, "budget": 4, "width": 2, "depth": 2},
    "user": "u", "metadata": {"a": "b"},
}  # fmt: skip
COMMON: Json = COMMON_TO_ALL | {"max_tokens": 2, "n": 1, "stream_options": {"include_usage": True}}
RESPONSE: Json = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
    ],
    "instructions": "short", "max_output_tokens": 2, "include": ["message.output_text.logprobs"], "top_logprobs": 1,
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
    "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": False, "reasoning": {"effort": "low"},
    "text": {"format": {"type": "text"}, "verbosity": "low"}, "truncation": "disabled", "store": False,
}  # fmt: skip
CHAT: Json = {"messages": [{"role": "system", "content": "short"}, {"role": "user", "content": "hi"}]}
PARTS: Json = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 2}
COMPLETION: Json = {"prompt": "a few words", "logprobs": 1, "max_tokens": 2}
BOUND: Json = {"prompt": "a", "max_tokens": 2, "structured_outputs": {"regex": "(a|b){1,3}"}}
SCHEMA: Json = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {}}}},
}
TOKENS: Json = {"prompt": [1, 2, 3], "echo": True, "max_tokens": 2}
BODIES: dict[str, tuple[Json, ...]] = {  # of each the last one is answered by simulated workers
    "/v1/chat/completions": (
        CHAT | COMMON | {"logprobs": True, "top_logprobs": 1},
        PARTS,
        CHAT | {"response_format": SCHEMA},
        CHAT | {"max_tokens": 1},
    ),
    "/v1/completions": (COMPLETION | COMMON, TOKENS, BOUND, COMPLETION),
    "/v1/responses": (
        RESPONSE | COMMON_TO_ALL,
        {"input": "hi", "text": {"format": SCHEMA["json_schema"] | {"type": "json_schema"}}},
        {"input": [{"role": "user", "content": "hi"}], "max_output_tokens": 1},
    ),
    "/tokenize": ({"prompt": "words", "return_token_strs": True}, CHAT),
    "/detokenize": ({"tokens": [1, 2, 3]},),
}
PATHS = (
    "/health", "/metrics", "/version", "/v1/models", "/v1/models/x", "/v1/responses/x", "/cluster", "/ui",
    "/ui/app.js", "/service-discovery", "/nothing", "/v1/chat/completions", "*", "//", "/%00", "/%ff%fe", "/..%2f..",
    "/decisions/request",
    "/decisions/%0d%0aX:%20y", "/v1/models/" + "x" * 3000, "http://elsewhere/health", "/health?" + "a=b&" * 500,
)  # fmt: skip
