"""Settings of each process: a frozen dataclass, read once at start from flags and environment variables.

The target's field `kv_memory`, for example, is set by the flag `--kv-memory` or else by `BOUGH_TARGET_KV_MEMORY`.
Unknown and malformed settings are refused by name.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass

from bough.config.parsers import (
    AUTO,
    DRAFT_BITS,
    DTYPE_NAMES,
    MAX_PORT,
    number,
    one_of,
    parse_amount,
    parse_bytes,
    parse_count,
    parse_device,
    parse_endpoint,
    parse_layers,
    parse_names,
    parse_natural,
    parse_port,
    parse_seconds,
    parse_shares,
)
from bough.config.reader import parse as parse  # re-exported for readers of settings
from bough.config.reader import setting
from bough.config.reader import to_flags as to_flags
from bough.runtime.machine import usable_cpus

DEFAULT_PORT = 7411
KEY_FILE_VARIABLE = "BOUGH_WORKER_KEY_FILE"
CERT_VARIABLE, TLS_KEY_VARIABLE, AUTHORITY_VARIABLE = "BOUGH_TLS_CERT", "BOUGH_TLS_KEY", "BOUGH_TLS_CA"
ADVERTISE_AUTO = "auto"
PLANNERS = ("self", "fixed")
ANY_TOOL_FORMAT = "auto"
TOOL_FORMATS = "hermes", "llama3_json", "mistral", "qwen3_coder", "seed_oss", "glm45", "glm47", "openai"
ANY_REASONING, REASONING_FORMATS = "auto", ("deepseek_r1", "deepseek_v3", "glm45", "mistral", "openai_gptoss", "qwen3")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """Settings of every process."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(0, "port to listen on; 0 takes a free one", parse_port)
    advertise: str = setting(
        ADVERTISE_AUTO, "host by which others reach this process; auto is --host, or this machine's towards the index"
    )
    advertise_port: int = setting(0, "port by which others reach this process, if it is not --port", parse_port)
    index_url: str = setting("redis://127.0.0.1:6379", "Redis or Valkey of the index; redis+cluster:// for a cluster")
    namespace: str = setting("bough", "prefix of all keys in the index: processes that share it work together")
    worker_key_file: str = setting(
        "", "file with a secret (`openssl rand -hex 32`) that workers' callers must present", shared=KEY_FILE_VARIABLE
    )
    tls_cert: str = setting(
        "", "PEM file of this process's certificate: TLS only; reloaded when it changes", shared=CERT_VARIABLE
    )
    tls_key: str = setting("", "PEM file of its private key, not readable by others", shared=TLS_KEY_VARIABLE)
    tls_ca: str = setting(
        "",
        "PEM file of the authority that signs all processes' certificates: workers then require these, over TLS",
        shared=AUTHORITY_VARIABLE,
    )
    tls_peer_names: tuple[str, ...] = setting(
        (), "names, as a,b: a caller's certificate must have one of them", parse_names, shared="BOUGH_TLS_PEER_NAMES"
    )
    insecure: bool = setting(
        False, "listen on addresses beyond this machine without requiring keys or certificates", shared="BOUGH_INSECURE"
    )
    metrics_port: int = setting(0, "port of /metrics; 0 takes a free one, -1 serves none", number(int, -1, MAX_PORT))
    open_metrics: bool = setting(False, "serve /metrics to anyone, also where keys or certificates are required")
    log_level: str = setting("INFO", "DEBUG, INFO, WARNING or ERROR", str.upper)
    log_format: str = setting("text", "format of log lines", one_of("text", "json"), shared="BOUGH_LOG_FORMAT")
    otlp_endpoint: str = setting(
        "", "OTLP collector of traces, as http://127.0.0.1:4317", parse_endpoint, shared="OTEL_EXPORTER_OTLP_ENDPOINT"
    )
    drain_seconds: float = setting(25.0, "seconds after SIGTERM in which running calls may finish", parse_amount)
    max_connection_age: float = setting(
        0.0, "seconds after which gRPC clients reconnect, so that a balancer can move them; 0 is never", parse_amount
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(ServiceConfig):
    """Settings of both workers."""

    model: str = setting(MISSING, "model folder or GGUF file, or hub id in the local cache", instead="simulate")
    simulate: str = setting("", "a worker without weights: a shipped profile's name or a JSON file, and no model")
    model_name: str = setting("", "public name of the model; by default that of its folder or file")
    dtype: str = setting(
        AUTO, "type to compute in; auto is bfloat16, on a GPU the checkpoint's own", one_of(AUTO, *DTYPE_NAMES)
    )
    device: str = setting("auto", "cpu, cuda or cuda:1; auto is a GPU if there is one", parse_device)
    backend: str = setting(
        AUTO,
        "what computes: cpu or triton are kernels of ours for --device, reference is torch alone, many times slower",
        one_of(AUTO, "cpu", "triton", "reference"),
    )
    threads: int = setting(usable_cpus(), "CPU threads for computation", parse_count)
    max_context: int = setting(
        0,
        "most tokens of a session, prompt and output; 0 is the model's own limit, as far as memory allows",
        parse_natural,
    )
    max_nodes: int = setting(512, "most nodes of a tree", parse_count)
    kv_memory: int = setting(
        0, "memory for KV slots; 0 is an eighth of all memory, at most 2GB or 32 sessions, at least one", parse_bytes
    )
    max_waiting: int = setting(1024, "most calls waiting at once; more are refused", parse_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig(WorkerConfig):
    """Settings of a draft worker."""

    drop_layers: tuple[int, ...] = setting(
        (), "layers of --model that the draft leaves out, such as 12-15", parse_layers
    )
    bits: str = setting(
        "auto",
        "bits of products; auto is 8 for Llamas where a CPU has those; 4 is packed, on a GPU",
        one_of(*DRAFT_BITS),
    )
    max_children: int = setting(16, "most children of a node", parse_count)
    inverse_temperature: float = setting(
        0.0, "inverse temperature of the draft's probabilities; 0 learns it from verdicts", number(float, 0, 4)
    )
    ahead_steps: int = setting(
        -1, "most draft-ahead steps between two calls; -1 is 64 on a GPU of its own and none elsewhere", number(int, -1)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig(WorkerConfig):
    """Settings of a target worker."""

    rows: int = setting(
        0, "rows of each matrix product, on which its bits depend; 0 is 256 on a GPU and 64 on a CPU", parse_natural
    )
    device_memory: int = setting(0, "memory for weights, KV and activations; 0 is most of what is free", parse_bytes)
    device_reserve: int = setting(0, "GPU memory left to others, such as a draft worker, taken or not yet", parse_bytes)
    host_memory: int = setting(
        0, "with a GPU: pinned memory for layers, and KV by --kv-tier host; 0 is most of what is free", parse_bytes
    )
    kv_sessions: int = setting(0, "instead of --kv-memory: sessions of --max-context tokens; 0 is off", parse_natural)
    kv_tier: str = setting(
        "device", "with a GPU: where KV is; on the host it streams with each layer", one_of("device", "host")
    )
    ring_memory: int = setting(0, "memory to read layers ahead; 0 is 512MB, or three layers if more", parse_bytes)
    resident_devices: tuple[tuple[str, int], ...] = setting(
        (), "other GPUs that compute resident layers, and memory for these and their KV: cuda:1=10GB", parse_shares
    )
    resident_layers: int = setting(-1, "most resident layers; -1 is as many as fit", number(int, -1))
    experts: str = setting(
        "auto",
        "experts that are read: those chosen by rows, or all, ahead; auto is chosen where memory can hold all",
        one_of("auto", "chosen", "all"),
    )
    link_threads: int = setting(8, "threads that read weights", parse_count)
    max_sweep_tokens: int = setting(1024, "most tokens of one sweep, all sessions together", parse_count)
    gather: float = setting(1.0, "longest wait for sessions that draft, in sweep durations; 0 is none", parse_amount)
    lease_seconds: float = setting(60.0, "idle seconds after which another session may take a slot", parse_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrchestratorConfig(ServiceConfig):
    """Settings of an orchestrator."""

    port: int = setting(DEFAULT_PORT, "port to listen on; 0 takes a free one", parse_port)
    planner: str = setting(
        "self", "tree sizes: self by cost, or fixed by --budget, --width, --depth", one_of(*PLANNERS)
    )
    max_depth: int = setting(24, "most levels of a tree sized by --planner self", parse_count)
    budget: int = setting(64, "nodes of a tree of fixed size, or before the target's cost is known", parse_count)
    sweep_nodes: int = setting(64, "nodes of fixed-size trees in a sweep, all sessions together", parse_count)
    width: int = setting(16, "nodes that a draft step expands; more in trees of more than 128 nodes", parse_count)
    depth: int = setting(7, "levels below the root of a tree of fixed size", parse_count)
    lookup: int = setting(16, "most nodes of a tree from prompt lookup; 0 is none", parse_natural)
    draft: str = setting("workers", "what drafts: workers, or none for lookup alone", one_of("workers", "none"))
    draft_timeout: float = setting(30.0, "seconds after which a round goes on without a draft worker", parse_seconds)
    target_timeout: float = setting(600.0, "seconds after which a target that does not answer is left", parse_seconds)
    failover_timeout: float = setting(60.0, "seconds that requests wait for a target to come back", parse_seconds)
    session_idle_seconds: float = setting(24 * 3600.0, "seconds a session is kept after its last use", parse_seconds)
    session_max_seconds: float = setting(7 * 24 * 3600.0, "the same after its first request", parse_seconds)
    trace_sample: float = setting(1.0, "share of requests to trace, if no traceparent decides", number(float, 0, 1))
    http_port: int = setting(0, "port of OpenAI's API over HTTP; 0: a free one, -1: none", number(int, -1, MAX_PORT))
    keys: str = setting("", "file of API keys (`bough keys add`), one of which clients need; reloaded when it changes")
    tls_client_ca: str = setting("", "PEM file of an authority: clients need a certificate of it or of --tls-ca")
    share_prefixes: bool = setting(
        False, "share cached prefixes among API keys: latencies then reveal to each what others have asked"
    )
    ui: str = setting("auto", "serve a page at /ui by HTTP; auto is on loopback only", one_of("auto", "yes", "no"))
    max_running: int = setting(64, "requests that run at once; others wait", parse_count)
    max_waiting: int = setting(256, "requests that may wait; one more is refused with a retry delay", parse_natural)
    tool_call_parser: str = setting(
        ANY_TOOL_FORMAT, "how models spell tool calls; auto: by chat template", one_of(ANY_TOOL_FORMAT, *TOOL_FORMATS)
    )
    reasoning_parser: str = setting(
        ANY_REASONING, "how models mark thoughts; auto: by template", one_of(ANY_REASONING, "none", *REASONING_FORMATS)
    )
    queue_timeout: float = setting(600.0, "seconds that a request may wait for place, target and slot", parse_seconds)
    stalled_timeout: float = setting(60.0, "seconds after which a stream ends that nobody reads", parse_seconds)
