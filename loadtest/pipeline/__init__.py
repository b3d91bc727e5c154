"""What `bough up` takes: its start, and the memory of its processes."""
