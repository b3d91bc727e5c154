"""What a client can mend where a connection over TLS, or one that should have been, does not come about.

gRPC has one status for all of it, and words of its own and of its library for TLS; what they mean is known here.
"""

from __future__ import annotations

AUTHORITY = "--tls-ca (BOUGH_TLS_CA)"
MEANINGS = (  # of words in gRPC's details; the first that are found count
    ("certificate has expired", "its certificate is over"),
    ("CERTIFICATE_VERIFY_FAILED", f"its certificate must be of the authority in {AUTHORITY}"),
    ("Hostname Verification", "its certificate must have the name in the address"),
    (
        "WRONG_VERSION_NUMBER",
        f"it does not speak TLS: the address must have no grpcs://, and {AUTHORITY} not be given",
    ),
)
CONNECTING = "failed to connect"
CLOSED = ("Socket closed", "Connection reset", "recvmsg")  # by a server that has been spoken to
CLOSED_MEANING = (
    f"where it speaks TLS, the address must be grpcs://HOST:PORT, or {AUTHORITY} be given; where it asks for a "
    "certificate, --tls-cert and --tls-key"
)


def explained(details: str) -> str:
    """gRPC's words about a call that was not answered, behind what they mean where they are about TLS."""
    meanings = [text for words, text in MEANINGS if words in details]
    if CONNECTING in details and any(words in details for words in CLOSED):
        meanings.append(CLOSED_MEANING)
    return f"{meanings[0]}; got: {details}" if meanings else details
