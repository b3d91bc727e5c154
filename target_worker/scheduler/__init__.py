"""The sweep thread, and the choice of calls for the next sweep."""
