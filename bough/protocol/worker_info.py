"""What a worker says of itself: model, limits, identity and load."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from bough.protocol.cost_curve import CostCurve

PROTOCOL_VERSION = 1


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's model, limits and load."""

    kind: str  # "draft" or "target"
    worker_id: str
    model_name: str
    model_description: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    max_context: int  # tokens of a session, the root included
    max_nodes: int
    max_sessions: int  # sessions of max_context tokens that fit; more if shorter
    num_sessions: int = 0
    kv_bytes: int = 0  # capacity of the KV cache
    kv_used_bytes: int = 0  # part of kv_bytes that cannot be evicted now
    num_waiting: int = 0  # calls that wait for a sweep or a draft step
    link_bytes_per_pass: int = 0
    notes: tuple[str, ...] = ()
    protocol_version: int = PROTOCOL_VERSION
    bough_version: str = ""
    arithmetic: str = ""  # of a target: kernels, data types and versions on which its exact bits depend
    cost: CostCurve | None = None  # seconds of a sweep, or of a draft step, by its rows
    num_running: int = 0  # calls in the current sweep; a draft counts all calls as waiting
    num_passes: int = 0  # sweeps or draft steps completed since the start
    weights_hash: str = ""  # of a target: hash over all weight bytes; empty until computed
    context_limit: str = ""  # flag that keeps max_context below the model's own limit, and that; empty if none does

    @property
    def model_identity(self) -> str:
        """Equal for targets of one model: a session may move among them, though perhaps not bit for bit."""
        return _digest(self.model_fingerprint, self.model_description, self.tokenizer_fingerprint)

    def contradiction(self, other: WorkerInfo) -> str:
        """Why sessions must not move between two targets of the same model identity; empty if nothing forbids it."""
        if {self.kind, other.kind} != {"target"} or self.model_identity != other.model_identity:
            return ""
        if not weights_differ(self.weights_hash, other.weights_hash):
            return ""
        first, second = sorted((self, other), key=lambda info: info.worker_id)
        return (
            f"{first.worker_id} and {second.worker_id} claim the same model but have different weights: "
            f"{first.weights_hash} and {second.weights_hash}"
        )

    @property
    def identity(self) -> str:
        """Equal for targets that produce equal tokens, bit for bit; short enough to be recorded."""
        return _digest(self.model_fingerprint, self.model_description, self.tokenizer_fingerprint, self.arithmetic)


def weights_differ(first: str, second: str) -> bool:
    """Whether both hashes are known and differ."""
    return bool(first and second) and first != second


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()
