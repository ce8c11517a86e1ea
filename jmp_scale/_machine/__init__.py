"""`python -m jmp_scale`: what half precision gains on this machine."""
