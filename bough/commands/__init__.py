"""The commands of `bough`, one file each."""
