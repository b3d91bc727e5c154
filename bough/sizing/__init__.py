"""Tree sizing: costs of sweeps and draft steps, values of guesses, best sizes, layer placement. Imports no torch."""
