"""The `bough` command: a file for each of its subcommands."""
