"""The rows of one model pass, of whichever sessions, and where each has its keys and values."""
