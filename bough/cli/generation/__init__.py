"""Commands that ask: `generate` and `chat`."""
