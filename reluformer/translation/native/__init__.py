"""Translation with the native library: encoder, decoder and search without torch."""
