"""Half precision on this machine, as `python -m jmp_scale` reports it."""
