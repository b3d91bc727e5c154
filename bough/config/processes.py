"""Settings: one frozen dataclass per process, read once at start from flags and environment.

A field `kv_memory` of the target's settings is the flag `--kv-memory` and the variable `BOUGH_TARGET_KV_MEMORY`; the
flag wins. What is unknown or cannot be read is refused by its name.
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
    parse_rates,
    parse_seconds,
    parse_shares,
    parse_speed,
    parse_switch,
)
from bough.config.reader import parse as parse  # who reads settings finds both here
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """What every process needs to know."""

    host: str = setting("127.0.0.1", str, "address to listen on")
    port: int = setting(0, parse_port, "port to listen on; 0 takes a free one")
    advertise: str = setting(
        ADVERTISE_AUTO,
        str,
        "host that others reach this process by; auto is --host, or where that is 0.0.0.0 or :: the address on the way "
        "to the index",
    )
    advertise_port: int = setting(0, parse_port, "port that others reach this process by, where it is not --port")
    index_url: str = setting(
        "redis://127.0.0.1:6379",
        str,
        "Redis or Valkey server that is the index; redis+cluster:// for a cluster of them",
    )
    namespace: str = setting("bough", str, "prefix of all keys in the index: processes that share it work together")
    worker_key_file: str = setting(
        "",
        str,
        "file of a secret, `openssl rand -hex 32`: workers answer only who shows it, and it is shown to them; "
        f"{KEY_FILE_VARIABLE} for all processes",
        shared=KEY_FILE_VARIABLE,
    )
    tls_cert: str = setting(
        "",
        str,
        "PEM file of this process's certificate: it then speaks nothing but TLS; read again as it changes. "
        f"{CERT_VARIABLE} for all processes, as {TLS_KEY_VARIABLE} and {AUTHORITY_VARIABLE}",
        shared=CERT_VARIABLE,
    )
    tls_key: str = setting("", str, "PEM file of the certificate's key, closed to others", shared=TLS_KEY_VARIABLE)
    tls_ca: str = setting(
        "",
        str,
        "PEM file of the authority of all processes' certificates: workers then answer only who has one of it, and are "
        "called only over TLS",
        shared=AUTHORITY_VARIABLE,
    )
    tls_peer_names: tuple[str, ...] = setting(
        (),
        parse_names,
        "names, such as a,b, of which a certificate must have one for a worker to answer; all of --tls-ca by default",
        shared="BOUGH_TLS_PEER_NAMES",
    )
    insecure: bool = setting(
        False,
        parse_switch,
        "listen beyond this machine though nothing keeps strangers out: neither keys nor certificates are asked for",
        shared="BOUGH_INSECURE",
    )
    open_metrics: bool = setting(
        False,
        parse_switch,
        "where keys or certificates are asked for: show /metrics to whoever reaches this host, without one",
    )
    log_level: str = setting("INFO", str.upper, "DEBUG, INFO, WARNING or ERROR")
    log_format: str = setting(
        "text",
        one_of("text", "json"),
        f"lines of the log for people, or a JSON object each; {LOG_FORMAT_VARIABLE} for all processes",
        shared=LOG_FORMAT_VARIABLE,
    )
    otlp_endpoint: str = setting(
        "",
        parse_endpoint,
        "send traces to this collector over gRPC (OTLP), such as http://127.0.0.1:4317; none where it is empty; "
        f"{OTLP_VARIABLE} for all processes",
        shared=OTLP_VARIABLE,
    )
    drain_seconds: float = setting(25.0, number(float, 0), "seconds after SIGTERM in which what runs may finish")
    max_connection_age: float = setting(
        0.0,
        number(float, 0),
        "seconds after which a gRPC client is told to connect anew, so that a balancer may send it elsewhere; calls "
        "that run go on where they are, however long; 0 is never",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(ServiceConfig):
    """What both workers need to know."""

    model: str = setting(MISSING, str, "model folder, or hub id in the local cache", instead="simulate")
    simulate: str = setting(
        "", str, "instead of a model: a shipped profile's name or a JSON file, for a worker without weights"
    )
    model_name: str = setting("", str, "name that users know the model by; its folder's name by default")
    dtype: str = setting(
        AUTO,
        one_of(AUTO, *DTYPE_NAMES),
        "data type to compute in; auto is the checkpoint's own on a GPU, and bfloat16 on a CPU",
    )
    device: str = setting("auto", parse_device, "cpu, cuda or cuda:1; auto is a GPU where there is one")
    threads: int = setting(usable_cpus(), parse_count, "CPU threads that compute")
    max_context: int = setting(2048, parse_count, "most tokens of a session, prompt and output")
    max_nodes: int = setting(512, parse_count, "most nodes of a tree")
    kv_memory: int = setting(
        0, parse_bytes, "memory for KV slots; 0 is an eighth of what there is, at most 2GB or 32 sessions, at least one"
    )
    max_waiting: int = setting(1024, parse_count, "most calls that wait for an answer; more are refused")
    metrics_port: int = setting(0, number(int, -1, 65535), "port of /metrics; 0 takes a free one, -1 serves none")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig(WorkerConfig):
    """Settings of a draft worker."""

    drop_layers: tuple[int, ...] = setting(
        (), parse_layers, "make a substitute draft: the model without these layers, such as 12-15"
    )
    bits: str = setting(
        "auto",
        one_of(*DRAFT_BITS),
        "of weights, in which products are made; auto is 8 on a CPU that has an instruction for them, for models of a "
        "Llama's build, and 16 otherwise; 4 is for a GPU that has little room: a model packed in 4 bits stays so there",
    )
    branch: int = setting(16, parse_count, "most children of a node")
    sharpness: float = setting(
        0.0,
        number(float, 0, 4),
        "power of the draft's own probabilities by which guesses are judged: 1 takes them as they are, 0 learns it "
        "from what the target says",
    )
    ahead_steps: int = setting(
        -1,
        number(int, -1),
        "most draft steps between two calls of a session, towards its likely next trees; 0 is none, -1 is 64 on a GPU "
        "of the draft's own and none elsewhere",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig(WorkerConfig):
    """Settings of a target worker."""

    rows: int = setting(
        0,
        number(int, 0),
        "rows of every matrix product, where those are a library's and equal sizes make equal bits; 0 is 256 on a GPU "
        "and 64 on a CPU",
    )
    device_memory: int = setting(0, parse_bytes, "memory for the model, KV and all; 0 takes most of what is free")
    device_reserve: int = setting(
        0,
        parse_bytes,
        "memory of a GPU that is another's, taken yet or not, such as a draft worker's on the same one",
    )
    host_memory: int = setting(
        0,
        parse_bytes,
        "beside a GPU: pinned memory for layers, and for KV that is kept there; 0 takes most of what is free",
    )
    kv_sessions: int = setting(
        0,
        number(int, 0),
        "instead of --kv-memory: sessions of the longest context that it is to hold; 0 is as told there",
    )
    kv_tier: str = setting(
        "device",
        one_of("device", "host"),
        "beside a GPU: where KV slots are kept; those on the host stream with each layer, and leave the GPU to weights",
    )
    ring_memory: int = setting(
        0,
        parse_bytes,
        "of it, at most so much for layers that were read ahead; 0 is 512MB, or three layers where those are more",
    )
    resident_devices: tuple[tuple[str, int], ...] = setting(
        (),
        parse_shares,
        "other GPUs that layers stay on and are computed on, and how much memory of each, KV of these layers and all: "
        "cuda:1=10GB",
    )
    resident_layers: int = setting(-1, number(int, -1), "most layers that stay in memory; -1 is as many as fit")
    experts: str = setting(
        "auto",
        one_of("auto", "chosen", "all"),
        "those that cross the link: what a sweep's rows have chosen, or all, ahead of them; auto is chosen, but all "
        "beside a GPU where the host's memory does not hold them",
    )
    link_threads: int = setting(8, parse_count, "threads that read weights")
    max_sweep_tokens: int = setting(1024, parse_count, "most tokens of one sweep, all sessions together")
    gather: float = setting(
        1.0, number(float, 0), "wait for sessions that draft, at most so many times a sweep's duration; 0 never waits"
    )
    lease_seconds: float = setting(60.0, parse_seconds, "idle time after which a session may lose its slot to another")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig(TargetConfig):
    """Settings of `bough plan`: those of the target that is planned, and of a machine that need not be this one."""

    draft: str = setting("", str, "model folder or hub id of the draft, which then takes its time in every round")
    draft_bits: str = setting(
        "auto",
        one_of(*DRAFT_BITS),
        "as the draft worker's --bits: 4 writes out a packed draft's matrices in every step",
    )
    bits: int = setting(0, one_of(0, 4, 8, 16), "bits of the layers' matrices: 4 or 8 as `bough pack` writes them")
    device: str = setting("", one_of("", "cpu", "gpu"), "cpu, or gpu: one with memory of its own; what is here")
    link_speed: float = setting(0.0, parse_speed, "GB/s from disk; measured where it is not given")
    host_link_speed: float = setting(0.0, parse_speed, "GB/s from the host's memory to a gpu's; measured")
    compute_speed: float = setting(0.0, parse_speed, "TFLOP/s of matrix products of --rows rows; measured")
    memory_speed: float = setting(0.0, parse_speed, "GB/s between the accelerator and its memory; measured")
    unpack_speed: float = setting(0.0, parse_speed, "GB/s of weights written out from 4 or 8 bits; measured")
    tokens_per_round: tuple[float, ...] = setting(
        (1.0, 3.0, 5.0, 8.0, 12.0), parse_rates, "accepted tokens and the bonus token, for which speeds are predicted"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OrchestratorConfig(ServiceConfig):
    """Settings of an orchestrator."""

    port: int = setting(DEFAULT_PORT, parse_port, "port to listen on; 0 takes a free one")
    planner: str = setting(
        "self", one_of(*PLANNERS), "trees size themselves, or have --budget, --width and --depth, to compare with"
    )
    max_depth: int = setting(24, parse_count, "most levels of a tree that sizes itself")
    budget: int = setting(64, parse_count, "nodes of a tree of fixed size, or before anything is known of the target")
    sweep_nodes: int = setting(64, parse_count, "nodes that all sessions' trees of fixed size share in a sweep")
    width: int = setting(16, parse_count, "nodes that a draft step expands; more in trees of more than 128 nodes")
    depth: int = setting(7, parse_count, "levels of a tree of fixed size below its root")
    lookup: int = setting(
        16, number(int, 0), "most nodes of a tree that come from the session's own text; 0 looks nothing up"
    )
    draft: str = setting("workers", one_of("workers", "none"), "what drafts: workers, or none but the lookup")
    draft_timeout: float = setting(30.0, parse_seconds, "seconds after which a round goes on without a draft worker")
    target_timeout: float = setting(
        600.0, parse_seconds, "seconds after which a target that does not answer is given up"
    )
    failover_timeout: float = setting(
        60.0, parse_seconds, "seconds that a running request waits for a target to come back or another to take over"
    )
    session_idle_seconds: float = setting(
        24 * 3600.0, parse_seconds, "after its last request a session is kept so long"
    )
    session_max_seconds: float = setting(7 * 24 * 3600.0, parse_seconds, "after its first request it ends, used or not")
    trace_sample: float = setting(
        1.0,
        number(float, 0, 1),
        "with --otlp-endpoint: share of requests that are traced, of those whose callers have not decided it by a "
        "traceparent",
    )
    metrics_port: int = setting(0, number(int, -1, 65535), "port of /metrics; 0 takes a free one, -1 serves none")
    http_port: int = setting(
        0, number(int, -1, 65535), "port that OpenAI's clients speak HTTP to; 0 takes a free one, -1 serves none"
    )
    keys: str = setting(
        "", str, "file of API keys, as `bough keys add` writes it, without one of which nobody comes in; read again as "
        "it changes, and at SIGHUP"
    )  # fmt: skip
    tls_client_ca: str = setting(
        "", str, "PEM file of an authority: clients must have a certificate of it (or of --tls-ca), at both doors"
    )
    share_prefixes: bool = setting(
        False,
        parse_switch,
        "what is computed of the prompts of one key's holder serves others' too: then cached_tokens and the time of a "
        "prompt tell each what others have asked",
    )
    ui: str = setting(
        "auto", one_of("auto", "yes", "no"), "serve a page to watch at /ui of the HTTP port; auto is on loopback only"
    )
    max_running: int = setting(64, parse_count, "requests that are generated at once; others wait for a place")
    max_waiting: int = setting(
        256, number(int, 0), "requests that may wait for a place; one more is RESOURCE_EXHAUSTED, with a retry delay"
    )
    queue_timeout: float = setting(
        600.0, parse_seconds, "seconds that a request waits in all, for a place and then for a KV slot of the target"
    )
    stalled_timeout: float = setting(
        60.0, parse_seconds, "seconds after which a stream ends whose client has stopped reading; its session is kept"
    )
