"""Loss scales: S and its rules, scaled gradients, steps applied or skipped."""
