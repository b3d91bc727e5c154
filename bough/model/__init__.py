"""Running a causal language model on packed trees: what the draft worker and the target worker share."""

import os

# How long an OpenMP thread spins before it sleeps, in turns; read once, when torch loads the library, so it is set
# here, before anything imports torch. The default is milliseconds: as soon as two processes compute on the same
# processors, threads spin while those that they wait for cannot run, and both become many times slower. A third of
# this lets them fall asleep between one product and the next (docs/decisions.md).
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
