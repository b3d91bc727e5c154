"""The `bough` command; its subcommands are in rooms by subject."""
