"""The studies, one small module each."""
