"""Documents in common formats: only their text is translated, everything else is kept."""
