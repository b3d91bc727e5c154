"""What must be equal for two targets to produce the same tokens: code and weights."""
