"""Programs by somebody who knew no rule of the lint: they count apart."""
