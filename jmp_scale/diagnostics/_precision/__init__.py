"""Answers whether half precision is enough for a program.

The `report` traces a program. `walk` applies the checks of single operations (`rules`),
of `loops` and of matrix `work`; `conclusions` has the checks of a whole program, and
`facts` and `lineage` describe values. `comparison` runs the program and compares it
with float32; `sensitivity` runs it with each product in half precision, by a `probe`.
"""
