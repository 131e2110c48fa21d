"""The order of rows by expert, and rows to experts and back."""
