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
    number,
    one_of,
    parse_bytes,
    parse_count,
    parse_device,
    parse_endpoint,
    parse_layers,
    parse_names,
    parse_port,
    parse_seconds,
    parse_shares,
    parse_speed,
    parse_switch,
)
from bough.config.reader import parse as parse  # re-exported for readers of settings
from bough.config.reader import setting
from bough.config.reader import to_flags as to_flags
from bough.runtime.machine import usable_cpus

DEFAULT_PORT = 7411
OTLP_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"  # OpenTelemetry's own
LOG_FORMAT_VARIABLE = "BOUGH_LOG_FORMAT"
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

    host: str = setting("127.0.0.1", str, "address to listen on")
    port: int = setting(0, parse_port, "port to listen on; 0 takes a free one")
    advertise: str = setting(
        ADVERTISE_AUTO,
        str,
        "host by which others reach this process; auto is --host or, if that is 0.0.0.0 or ::, the source address "
        "towards the index",
    )
    advertise_port: int = setting(0, parse_port, "port by which others reach this process, if it is not --port")
    index_url: str = setting(
        "redis://127.0.0.1:6379", str, "Redis or Valkey server for the index; redis+cluster:// for a cluster"
    )
    namespace: str = setting("bough", str, "prefix of all keys in the index: processes that share it work together")
    worker_key_file: str = setting(
        "",
        str,
        "file with a secret, as from `openssl rand -hex 32`: workers answer only callers that present it; "
        f"{KEY_FILE_VARIABLE} sets it for all processes",
        shared=KEY_FILE_VARIABLE,
    )
    tls_cert: str = setting(
        "",
        str,
        "PEM file of this process's certificate: it then serves TLS only; reloaded when it changes. "
        f"{CERT_VARIABLE} sets it for all processes, as {TLS_KEY_VARIABLE} and {AUTHORITY_VARIABLE} do for theirs",
        shared=CERT_VARIABLE,
    )
    tls_key: str = setting(
        "", str, "PEM file of the certificate's private key, not readable by others", shared=TLS_KEY_VARIABLE
    )
    tls_ca: str = setting(
        "",
        str,
        "PEM file of the authority that signs all processes' certificates: workers then accept only callers with such "
        "a certificate, and are called only over TLS",
        shared=AUTHORITY_VARIABLE,
    )
    tls_peer_names: tuple[str, ...] = setting(
        (),
        parse_names,
        "names, such as a,b, one of which a caller's certificate must have; by default any certificate of --tls-ca",
        shared="BOUGH_TLS_PEER_NAMES",
    )
    insecure: bool = setting(
        False,
        parse_switch,
        "listen on addresses beyond this machine without requiring keys or certificates",
        shared="BOUGH_INSECURE",
    )
    open_metrics: bool = setting(
        False, parse_switch, "if keys or certificates are required: serve /metrics without them, and to other hosts"
    )
    log_level: str = setting("INFO", str.upper, "DEBUG, INFO, WARNING or ERROR")
    log_format: str = setting(
        "text",
        one_of("text", "json"),
        f"log lines as text, or as a JSON object each; {LOG_FORMAT_VARIABLE} sets it for all processes",
        shared=LOG_FORMAT_VARIABLE,
    )
    otlp_endpoint: str = setting(
        "",
        parse_endpoint,
        "collector that receives traces over gRPC (OTLP), such as http://127.0.0.1:4317; empty sends none; "
        f"{OTLP_VARIABLE} sets it for all processes",
        shared=OTLP_VARIABLE,
    )
    drain_seconds: float = setting(25.0, number(float, 0), "seconds after SIGTERM in which running calls may finish")
    max_connection_age: float = setting(
        0.0,
        number(float, 0),
        "seconds after which a gRPC client is told to reconnect, so that a balancer can move it; running calls are "
        "not interrupted; 0 is never",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(ServiceConfig):
    """Settings of both workers."""

    model: str = setting(MISSING, str, "model folder or GGUF file, or hub id in the local cache", instead="simulate")
    simulate: str = setting(
        "", str, "instead of a model: a shipped profile's name or a JSON file, for a worker without weights"
    )
    model_name: str = setting("", str, "public name of the model; by default that of its folder or file")
    dtype: str = setting(
        AUTO,
        one_of(AUTO, *DTYPE_NAMES),
        "data type to compute in; auto is the checkpoint's own on a GPU, and bfloat16 on a CPU",
    )
    device: str = setting("auto", parse_device, "cpu, cuda or cuda:1; auto is a GPU if there is one")
    threads: int = setting(usable_cpus(), parse_count, "CPU threads for computation")
    max_context: int = setting(2048, parse_count, "most tokens of a session, prompt and output")
    max_nodes: int = setting(512, parse_count, "most nodes of a tree")
    kv_memory: int = setting(
        0, parse_bytes, "memory for KV slots; 0 is an eighth of all memory, at most 2GB or 32 sessions, at least one"
    )
    max_waiting: int = setting(1024, parse_count, "most calls waiting at once; more are refused")
    metrics_port: int = setting(0, number(int, -1, 65535), "port of /metrics; 0 takes a free one, -1 serves none")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig(WorkerConfig):
    """Settings of a draft worker."""

    drop_layers: tuple[int, ...] = setting(
        (), parse_layers, "use a substitute draft: the model without these layers, such as 12-15"
    )
    bits: str = setting(
        "auto",
        one_of(*DRAFT_BITS),
        "bits of weights in products; auto is 8 for Llamas on CPUs with 8-bit dot products; 4 is packed, on a GPU",
    )
    branch: int = setting(16, parse_count, "most children of a node")
    sharpness: float = setting(
        0.0,
        number(float, 0, 4),
        "inverse temperature that calibrates the draft's probabilities: 1 leaves them unchanged, 0 learns it from the "
        "target's verdicts",
    )
    ahead_steps: int = setting(
        -1,
        number(int, -1),
        "most draft-ahead steps between two calls of a session; 0 is none, -1 is 64 on a GPU of the draft's own and "
        "none elsewhere",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig(WorkerConfig):
    """Settings of a target worker."""

    rows: int = setting(
        0,
        number(int, 0),
        "rows of each matrix product by a library, whose bits depend on this size; 0 is 256 on a GPU and 64 on a CPU",
    )
    device_memory: int = setting(0, parse_bytes, "memory for weights, KV and activations; 0 is most of what is free")
    device_reserve: int = setting(0, parse_bytes, "GPU memory left to others, such as a draft worker, taken or not yet")
    host_memory: int = setting(
        0,
        parse_bytes,
        "with a GPU: pinned host memory for layers, and for KV with --kv-tier host; 0 is most of what is free",
    )
    kv_sessions: int = setting(0, number(int, 0), "instead of --kv-memory: sessions of --max-context tokens; 0 is off")
    kv_tier: str = setting(
        "device",
        one_of("device", "host"),
        "with a GPU: where KV slots are kept; those on the host stream with each layer and leave the GPU to weights",
    )
    ring_memory: int = setting(
        0,
        parse_bytes,
        "memory of the ring for layers read ahead; 0 is the larger of 512MB and three layers",
    )
    resident_devices: tuple[tuple[str, int], ...] = setting(
        (), parse_shares, "other GPUs that compute resident layers, and memory for these and their KV: cuda:1=10GB"
    )
    resident_layers: int = setting(-1, number(int, -1), "most resident layers; -1 is as many as fit")
    experts: str = setting(
        "auto",
        one_of("auto", "chosen", "all"),
        "experts that cross the link: those chosen by a sweep's rows, or all, ahead of time; auto is chosen, but all "
        "with a GPU if the host's memory cannot hold them",
    )
    link_threads: int = setting(8, parse_count, "threads that read weights")
    max_sweep_tokens: int = setting(1024, parse_count, "most tokens of one sweep, all sessions together")
    gather: float = setting(
        1.0, number(float, 0), "longest batch delay for sessions that draft, in sweep durations; 0 is none"
    )
    lease_seconds: float = setting(60.0, parse_seconds, "idle seconds after which another session may take a slot")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig(TargetConfig):
    """Settings of `bough plan`: those of the planned target, and of its machine, which may be another."""

    draft: str = setting("", str, "model folder, GGUF file or hub id of the draft, to include its time in each round")
    draft_bits: str = setting("auto", one_of(*DRAFT_BITS), "the draft worker's --bits; 4 unpacks in every step")
    bits: int = setting(0, one_of(0, 4, 8, 16), "bits of the layers' matrices: 4 or 8 as `bough pack` writes them")
    device: str = setting("", one_of("", "cpu", "gpu"), "cpu, or gpu with its own memory; by default this machine's")
    link_speed: float = setting(0.0, parse_speed, "GB/s from disk; measured by default")
    host_link_speed: float = setting(0.0, parse_speed, "GB/s from host memory to a gpu's; measured by default")
    crossing_speed: float = setting(0.0, parse_speed, "GB/s from one gpu to another; measured or assumed by default")
    compute_speed: float = setting(0.0, parse_speed, "TFLOP/s of matrix products of --rows rows; measured by default")
    memory_speed: float = setting(0.0, parse_speed, "GB/s of the accelerator's memory; measured by default")
    unpack_speed: float = setting(0.0, parse_speed, "GB/s of weights unpacked from 4 or 8 bits; measured by default")


@dataclass(frozen=True, slots=True, kw_only=True)
class OrchestratorConfig(ServiceConfig):
    """Settings of an orchestrator."""

    port: int = setting(DEFAULT_PORT, parse_port, "port to listen on; 0 takes a free one")
    planner: str = setting(
        "self",
        one_of(*PLANNERS),
        "tree sizes: self chooses them by measured cost, fixed uses --budget, --width, --depth",
    )
    max_depth: int = setting(24, parse_count, "most levels of a tree sized by --planner self")
    budget: int = setting(64, parse_count, "nodes of a tree of fixed size, or before the target's cost is known")
    sweep_nodes: int = setting(64, parse_count, "nodes of fixed-size trees in a sweep, all sessions together")
    width: int = setting(16, parse_count, "nodes that a draft step expands; more in trees of more than 128 nodes")
    depth: int = setting(7, parse_count, "levels below the root of a tree of fixed size")
    lookup: int = setting(16, number(int, 0), "most nodes of a tree from prompt lookup; 0 is none")
    draft: str = setting("workers", one_of("workers", "none"), "what drafts: workers, or none for lookup alone")
    draft_timeout: float = setting(30.0, parse_seconds, "seconds after which a round goes on without a draft worker")
    target_timeout: float = setting(600.0, parse_seconds, "seconds after which a target that does not answer is left")
    failover_timeout: float = setting(
        60.0, parse_seconds, "seconds that requests, also new ones, wait for a target to come back or for another one"
    )
    session_idle_seconds: float = setting(24 * 3600.0, parse_seconds, "seconds a session is kept after its last use")
    session_max_seconds: float = setting(7 * 24 * 3600.0, parse_seconds, "the same after its first request")
    trace_sample: float = setting(
        1.0, number(float, 0, 1), "with --otlp-endpoint: share of requests to trace, if no traceparent decides"
    )
    metrics_port: int = setting(0, number(int, -1, 65535), "port of /metrics; 0 takes a free one, -1 serves none")
    http_port: int = setting(0, number(int, -1, 65535), "port of OpenAI's API over HTTP; 0: a free one, -1: none")
    keys: str = setting(
        "", str, "file of API keys, as `bough keys add` writes it: clients must present one; reloaded when it changes "
        "and at SIGHUP"
    )  # fmt: skip
    tls_client_ca: str = setting(
        "", str, "PEM file of an authority: clients must have a certificate of it or of --tls-ca, for gRPC and HTTP"
    )
    share_prefixes: bool = setting(
        False,
        parse_switch,
        "share cached prompt prefixes among holders of different API keys: cached_tokens and latencies then reveal to "
        "each what others have asked",
    )
    ui: str = setting(
        "auto", one_of("auto", "yes", "no"), "serve a live page at /ui of the HTTP port; auto is on loopback only"
    )
    max_running: int = setting(64, parse_count, "requests that run at once; others wait")
    max_waiting: int = setting(256, number(int, 0), "requests that may wait; one more is refused with a retry delay")
    tool_call_parser: str = setting(
        ANY_TOOL_FORMAT, one_of(ANY_TOOL_FORMAT, *TOOL_FORMATS), "how models spell tool calls; auto: by chat template"
    )
    reasoning_parser: str = setting(
        ANY_REASONING, one_of(ANY_REASONING, "none", *REASONING_FORMATS), "how models mark thoughts; auto: by template"
    )
    queue_timeout: float = setting(
        600.0, parse_seconds, "seconds that a request may wait in all, to be admitted, for a target and for a KV slot"
    )
    stalled_timeout: float = setting(
        60.0, parse_seconds, "seconds after which a stream ends if its client stops reading; its session is kept"
    )
