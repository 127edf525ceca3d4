"""What a stage keeps between a forward and its backward, and where."""
