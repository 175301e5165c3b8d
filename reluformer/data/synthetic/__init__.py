"""Generated tasks that need no data."""
