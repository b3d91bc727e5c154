"""The client for applications that call a running bough.

It has all that a caller gives and gets: prompts and options, events and reports, and the errors that are raised.

from bough.client import ChatPrompt, Client, GenerateOptions, Message, Tokens
"""

from bough.client.client import Client
from bough.errors import (
    AlreadyRunning,
    BoughError,
    ConfigError,
    ContextExceeded,
    DeadlineExceeded,
    Exhausted,
    InvalidRequest,
    NoAnswer,
    NotFound,
    StaleEpoch,
    Unauthenticated,
    Unavailable,
)
from bough.protocol.cost_curve import CostCurve
from bough.protocol.decision import Decision, DraftCalibration, Mode, RoundSeconds, RoundTimings
from bough.protocol.generation import (
    ChatPrompt,
    Constraint,
    Event,
    Finished,
    Function,
    GenerateOptions,
    Loads,
    Message,
    ModelInfo,
    Prompt,
    PromptLogprobs,
    Resume,
    ServerInfo,
    Speculation,
    SpeculationMetrics,
    Started,
    TextPrompt,
    TokenPrompt,
    Tokens,
    ToolCall,
    ToolChoice,
    Tools,
    Usage,
    WorkerStatus,
)
from bough.protocol.sampling_params import PositionLogprobs, SamplingParams, TokenLogprob
from bough.protocol.worker_info import WorkerInfo
from bough.security.certificates import CertificateFiles
from bough.trees.scheme_acceptance import DepthCounts, SchemeAcceptance
from bough.trees.tree_plan import BestFirst, Growth, Scheme, StaticShape

__all__ = [
    "AlreadyRunning",
    "BestFirst",
    "BoughError",
    "CertificateFiles",
    "ChatPrompt",
    "Client",
    "ConfigError",
    "Constraint",
    "ContextExceeded",
    "CostCurve",
    "DeadlineExceeded",
    "Decision",
    "DepthCounts",
    "DraftCalibration",
    "Event",
    "Exhausted",
    "Finished",
    "Function",
    "GenerateOptions",
    "Growth",
    "InvalidRequest",
    "Loads",
    "Message",
    "Mode",
    "ModelInfo",
    "NoAnswer",
    "NotFound",
    "PositionLogprobs",
    "Prompt",
    "PromptLogprobs",
    "Resume",
    "RoundSeconds",
    "RoundTimings",
    "SamplingParams",
    "Scheme",
    "SchemeAcceptance",
    "ServerInfo",
    "Speculation",
    "SpeculationMetrics",
    "StaleEpoch",
    "Started",
    "StaticShape",
    "TextPrompt",
    "TokenLogprob",
    "TokenPrompt",
    "Tokens",
    "ToolCall",
    "ToolChoice",
    "Tools",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "WorkerInfo",
    "WorkerStatus",
]
