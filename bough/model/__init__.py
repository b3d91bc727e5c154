"""Running a causal language model on packed trees: what the draft worker and the target worker share."""
