"""Who decides how large trees are: one sizer, which every limit passes through, and a record of its decisions."""
