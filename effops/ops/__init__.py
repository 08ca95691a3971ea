"""One module an op, or a tight family of ops."""
