"""What a user's source says, and whether other statements give the same: slices of functions, patterns, and trials."""
