"""The main loop: draft, verify, commit, and continue after worker failures."""
