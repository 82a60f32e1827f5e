"""Named experiments: many simulations, one table and one plot."""
