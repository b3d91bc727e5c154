"""The `bough` command, with a file for each subcommand."""
