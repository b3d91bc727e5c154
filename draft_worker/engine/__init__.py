"""Sessions and calls at the draft worker, and the thread that runs its model."""
