"""How weights get to where they are computed with: from disk, from the host's memory, to an accelerator."""
