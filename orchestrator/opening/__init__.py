"""From what a client asks to a session that can run, and what is left of it afterwards."""
