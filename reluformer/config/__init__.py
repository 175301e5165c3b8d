"""Settings of models, training and search: strict dataclasses, read from YAML recipes."""
