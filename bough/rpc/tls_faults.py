"""Explains failed TLS connections in terms of what a client can change.

gRPC has one status for all of them, with its own words and those of its TLS library.
"""

from __future__ import annotations

AUTHORITY = "--tls-ca (BOUGH_TLS_CA)"
MEANINGS = (  # of words in gRPC's details; the first match counts
    ("certificate has expired", "its certificate must be valid now"),
    ("CERTIFICATE_VERIFY_FAILED", f"its certificate must be of the authority in {AUTHORITY}"),
    ("Hostname Verification", "its certificate must have the name in the address"),
    (
        "WRONG_VERSION_NUMBER",
        f"it does not speak TLS: the address must have no grpcs://, and {AUTHORITY} not be given",
    ),
)
CONNECTING = "failed to connect"
CLOSED = ("Socket closed", "Connection reset", "recvmsg")  # by a server that was connected to
CLOSED_MEANING = (
    f"where it speaks TLS, the address must be grpcs://HOST:PORT, or {AUTHORITY} be given; where it asks for a "
    "certificate, --tls-cert and --tls-key"
)


def explained(details: str) -> str:
    """gRPC's details of a failed call, preceded by their meaning if they are about TLS."""
    meanings = [text for words, text in MEANINGS if words in details]
    if CONNECTING in details and any(words in details for words in CLOSED):
        meanings.append(CLOSED_MEANING)
    return f"{meanings[0]}; got: {details}" if meanings else details
