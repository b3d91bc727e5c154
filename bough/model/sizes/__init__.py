"""How large a model is, how fast this machine is, and how its memory is shared out."""
