"""Sessions and calls at the draft worker, and the draft steps that grow their trees."""
