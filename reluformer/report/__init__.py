"""Reports: studies and runs on one self-contained page, as HTML and as Markdown."""
