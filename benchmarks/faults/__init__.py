"""Commands that are killed or run out of disk: jobs, kills, and file systems that refuse."""
