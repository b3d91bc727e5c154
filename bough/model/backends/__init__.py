"""The implementations of `bough.model.backend.Backend`, the only modules that import kernels; one for each name."""
