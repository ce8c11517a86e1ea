"""Storage in half precision: parameters that lose no update."""
