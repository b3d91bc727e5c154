"""What processes are to the system they run on: what they may take of it. Knows no torch."""
