"""How close trees that size themselves come to the best fixed size, on simulated workers and on real ones."""
