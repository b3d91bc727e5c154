"""What only a GPU runs. Imports Triton where a kernel is asked for, not before."""
