"""The rows of one model pass, of all its sessions, and where their keys and values are."""
