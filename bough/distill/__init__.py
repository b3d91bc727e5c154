"""Making a draft out of its target: some layers left out, and the rest healed on text that the target writes itself."""

# How OpenMP's threads wait is settled in `bough.model`, before anything imports torch.
import bough.model  # noqa: F401
