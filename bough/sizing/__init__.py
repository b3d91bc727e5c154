"""Tree sizing: costs of sweeps and draft steps, values of guesses, best sizes, and layer placement. Imports no torch."""
