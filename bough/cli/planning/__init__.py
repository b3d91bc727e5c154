"""Commands that predict: `plan`, `shape` and `simulate`."""
