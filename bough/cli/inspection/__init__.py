"""Commands that show what is running: `doctor`, `top` and `explain`."""
