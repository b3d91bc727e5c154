"""Processes of bough: how one runs, how a machine's are started, watched and ended, and whether they fit together."""
