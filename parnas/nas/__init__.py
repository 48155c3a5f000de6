"""Architecture search: training the SuperNet, and deriving an architecture from it."""
