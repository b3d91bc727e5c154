"""What a GPU will run, looked at or measured."""
