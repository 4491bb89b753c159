"""How fast is it: benches that a command prints."""
