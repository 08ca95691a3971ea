"""Programs that the lint was written with."""
