"""What processes tell of themselves while they run."""
