"""Islands of cheap operations, which the backward pass recomputes."""
