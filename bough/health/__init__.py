"""`python -m bough.health`: whether a process serves, for containers and scripts."""
