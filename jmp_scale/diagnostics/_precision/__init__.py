"""Answers whether half precision is enough for a program.

The `report` traces a program. `walk` derives the `facts` about it and applies the
`rules` of single operations; `report` adds those of a whole program. `comparison` runs
the program and compares it with float32; `sensitivity` runs it with each product in
half precision, by a `probe`.
"""
