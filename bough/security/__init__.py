"""Who may call whom: keys of applications and of workers, and where one may listen without them."""
