"""Resources of the operating system: processors, memory, the allocator, and exiting. Does not import torch."""
