"""Translation of text: search, segmentation, streams."""
