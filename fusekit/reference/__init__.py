"""What each operation means, in NumPy."""
