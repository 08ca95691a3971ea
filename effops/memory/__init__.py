"""The memory of training: estimated, taken apart, fitted into a budget, and reduced."""
