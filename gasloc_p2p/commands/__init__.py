"""What each `gasloc` command does, once its arguments have been read."""
