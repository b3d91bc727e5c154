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
    parse_address_or_none,
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
    port: int = setting(0, "port to listen on; 0 picks a free one", parse_port)
    advertise: str = setting(
        ADVERTISE_AUTO,
        "host at which others reach this process; auto is --host, or this machine's address towards the index",
    )
    advertise_port: int = setting(0, "port at which others reach this process, if it is not --port", parse_port)
    index_url: str = setting(
        "redis://127.0.0.1:6379", "URL of the index, a Redis or Valkey; redis+cluster:// for a cluster"
    )
    namespace: str = setting("bough", "prefix of all keys in the index; processes with the same one work together")
    worker_key_file: str = setting(
        "", "file with a secret (`openssl rand -hex 32`) that callers of workers must send", shared=KEY_FILE_VARIABLE
    )
    tls_cert: str = setting(
        "", "PEM file of this process's certificate: TLS only; reloaded when it changes", shared=CERT_VARIABLE
    )
    tls_key: str = setting("", "PEM file of its private key, not readable by others", shared=TLS_KEY_VARIABLE)
    tls_ca: str = setting(
        "",
        "PEM file of the authority that signs all processes' certificates; workers then require one from callers",
        shared=AUTHORITY_VARIABLE,
    )
    tls_peer_names: tuple[str, ...] = setting(
        (),
        "names such as a,b; a caller's certificate must have one of them",
        parse_names,
        shared="BOUGH_TLS_PEER_NAMES",
    )
    insecure: bool = setting(
        False, "listen on addresses beyond this machine without requiring keys or certificates", shared="BOUGH_INSECURE"
    )
    metrics_port: int = setting(0, "port of /metrics; 0 picks a free one, -1 serves none", number(int, -1, MAX_PORT))
    open_metrics: bool = setting(False, "serve /metrics to anyone, even if keys or certificates are required")
    log_level: str = setting("INFO", "DEBUG, INFO, WARNING or ERROR", str.upper)
    log_format: str = setting("text", "format of log lines", one_of("text", "json"), shared="BOUGH_LOG_FORMAT")
    otlp_endpoint: str = setting(
        "",
        "OTLP collector of traces, such as http://127.0.0.1:4317",
        parse_endpoint,
        shared="OTEL_EXPORTER_OTLP_ENDPOINT",
    )
    drain_seconds: float = setting(25.0, "seconds that running calls have to finish after SIGTERM", parse_amount)
    max_connection_age: float = setting(
        0.0, "seconds after which gRPC clients reconnect, so that a balancer can move them; 0 is never", parse_amount
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(ServiceConfig):
    """Settings of both workers."""

    model: str = setting(MISSING, "model folder, GGUF file, or hub id in the local cache", instead="simulate")
    simulate: str = setting("", "run without weights or --model, by a shipped profile's name or a JSON file")
    model_name: str = setting("", "public name of the model (default: that of its folder or file)")
    dtype: str = setting(
        AUTO,
        "data type of computation; auto is bfloat16 on a CPU, the checkpoint's own on a GPU",
        one_of(AUTO, *DTYPE_NAMES),
    )
    device: str = setting("auto", "cpu, cuda or cuda:1; auto is a GPU if there is one", parse_device)
    backend: str = setting(
        AUTO,
        "cpu and triton are bough's kernels, cublas multiplies by cuBLAS, reference is slow plain torch; "
        "auto takes the first that passes a check on a GPU",
        one_of(AUTO, "cpu", "triton", "cublas", "reference"),
    )
    threads: int = setting(usable_cpus(), "CPU threads for computation", parse_count)
    max_context: int = setting(
        0,
        "maximum tokens of a session, prompt and output; 0 is the model's own limit, as far as memory allows",
        parse_natural,
    )
    max_nodes: int = setting(512, "maximum nodes of a tree", parse_count)
    kv_memory: int = setting(
        0,
        "memory for KV slots; 0 is an eighth of all memory, at most 2GB or 32 sessions, at least one session",
        parse_bytes,
    )
    max_waiting: int = setting(1024, "maximum waiting calls; more are refused", parse_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig(WorkerConfig):
    """Settings of a draft worker."""

    drop_layers: tuple[int, ...] = setting(
        (), "layers of --model that the draft leaves out, such as 12-15", parse_layers
    )
    bits: str = setting(
        "auto",
        "bits of matrix products; auto is 8 for Llamas on CPUs that support it; 4 needs a GPU",
        one_of(*DRAFT_BITS),
    )
    max_children: int = setting(16, "maximum children of a node", parse_count)
    inverse_temperature: float = setting(
        0.0, "inverse temperature of the draft's probabilities; 0 learns it from verdicts", number(float, 0, 4)
    )
    ahead_steps: int = setting(
        -1,
        "maximum draft-ahead steps between two calls; -1 is 64 if the draft has its own GPU, else none",
        number(int, -1),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig(WorkerConfig):
    """Settings of a target worker."""

    rows: int = setting(
        0,
        "most rows that a layer computes together; where all products need equally many, bits depend on it; 0 is auto",
        parse_natural,
    )
    device_memory: int = setting(0, "memory for weights, KV and activations; 0 is most of the free memory", parse_bytes)
    device_reserve: int = setting(0, "GPU memory reserved for other processes, such as a draft worker", parse_bytes)
    host_memory: int = setting(
        0, "with a GPU: pinned memory for layers, and KV with --kv-tier host; 0 is most of the free memory", parse_bytes
    )
    kv_sessions: int = setting(0, "instead of --kv-memory: sessions of --max-context tokens; 0 is off", parse_natural)
    kv_tier: str = setting(
        "device", "with a GPU: where KV is stored; host KV streams with each layer", one_of("device", "host")
    )
    ring_memory: int = setting(
        0, "memory for reading layers ahead; 0 is 512MB or three layers, the larger of the two", parse_bytes
    )
    resident_devices: tuple[tuple[str, int], ...] = setting(
        (), "further GPUs for resident layers, with memory for layers and KV: cuda:1=10GB", parse_shares
    )
    resident_layers: int = setting(-1, "maximum resident layers; -1 is as many as fit", number(int, -1))
    experts: str = setting(
        "auto",
        "experts to read: those that rows chose, or all ahead of time; auto is chosen if all fit into memory",
        one_of("auto", "chosen", "all"),
    )
    link_threads: int = setting(8, "threads that read weights", parse_count)
    max_sweep_tokens: int = setting(
        0,
        "maximum tokens of one sweep over all sessions; 0 is 1024, and on a GPU up to 4096 while the link is slower",
        parse_natural,
    )
    gather: float = setting(1.0, "how long a sweep may wait for sessions that draft, in sweep durations", parse_amount)
    lease_seconds: float = setting(60.0, "idle seconds after which another session may take a slot", parse_seconds)
    stages: int = setting(
        1, "machines that hold the layers together: this one, and others started with --stage-of", parse_count
    )
    sweeps_in_flight: int = setting(2, "sweeps that several stages compute at the same time", parse_count)
    stage_of: str = setting(
        "", "HOST:PORT of a target with --stages, for which this process holds layers", parse_address_or_none
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OrchestratorConfig(ServiceConfig):
    """Settings of an orchestrator."""

    port: int = setting(DEFAULT_PORT, "port to listen on; 0 picks a free one", parse_port)
    planner: str = setting(
        "self",
        "how trees are sized: self, by measured cost, or fixed, by --budget, --width, --depth",
        one_of(*PLANNERS),
    )
    max_depth: int = setting(24, "maximum depth of trees with --planner self", parse_count)
    budget: int = setting(64, "nodes of a tree of fixed size, or before the target's cost is known", parse_count)
    sweep_nodes: int = setting(64, "nodes of fixed-size trees in a sweep over all sessions", parse_count)
    width: int = setting(16, "nodes that a draft step expands; more in trees of more than 128 nodes", parse_count)
    depth: int = setting(7, "depth of a tree of fixed size below the root", parse_count)
    lookup: int = setting(16, "maximum nodes of a tree from prompt lookup; 0 is none", parse_natural)
    draft: str = setting(
        "workers", "source of drafts: workers, or none for prompt lookup only", one_of("workers", "none")
    )
    draft_timeout: float = setting(30.0, "seconds after which a round continues without a draft worker", parse_seconds)
    target_timeout: float = setting(
        600.0, "seconds after which a session leaves a target that does not answer", parse_seconds
    )
    failover_timeout: float = setting(60.0, "seconds that requests wait for a target to come back", parse_seconds)
    session_idle_seconds: float = setting(
        24 * 3600.0, "seconds until a session expires after its last use", parse_seconds
    )
    session_max_seconds: float = setting(
        7 * 24 * 3600.0, "seconds until a session expires after its first request", parse_seconds
    )
    trace_sample: float = setting(1.0, "share of requests to trace, if no traceparent decides", number(float, 0, 1))
    http_port: int = setting(0, "port of OpenAI's API over HTTP; 0: a free one, -1: none", number(int, -1, MAX_PORT))
    keys: str = setting("", "file of API keys (`bough keys add`); clients need one of them; reloaded when it changes")
    tls_client_ca: str = setting("", "PEM file of an authority; clients need a certificate from it or from --tls-ca")
    share_prefixes: bool = setting(
        False, "share cached prefixes among API keys; latencies can then reveal the prompts of other keys"
    )
    ui: str = setting("auto", "serve a page at /ui by HTTP; auto is on loopback only", one_of("auto", "yes", "no"))
    max_running: int = setting(64, "maximum concurrent requests; others wait", parse_count)
    max_waiting: int = setting(256, "maximum waiting requests; more are refused with a retry delay", parse_natural)
    tool_call_parser: str = setting(
        ANY_TOOL_FORMAT, "format of models' tool calls; auto: by chat template", one_of(ANY_TOOL_FORMAT, *TOOL_FORMATS)
    )
    reasoning_parser: str = setting(
        ANY_REASONING,
        "format of models' reasoning; auto: by chat template",
        one_of(ANY_REASONING, "none", *REASONING_FORMATS),
    )
    queue_timeout: float = setting(
        600.0, "seconds that a request may wait to be admitted, for a target and for a slot", parse_seconds
    )
    stalled_timeout: float = setting(
        60.0, "seconds after which a stream ends if the client does not read", parse_seconds
    )
