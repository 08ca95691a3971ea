"""Models whose training memory has been published, to predict it."""
