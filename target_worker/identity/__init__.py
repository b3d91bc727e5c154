"""What decides whether two targets would say the same: code and weights."""
