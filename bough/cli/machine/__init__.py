"""Commands that run a bough on this machine: `up` and `demo`."""
