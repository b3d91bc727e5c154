"""Trees of guesses: as arrays, how they are to grow, which shape is best, and how likely guesses are accepted."""
