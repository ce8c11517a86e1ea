"""Answers whether half precision is enough for a program.

The `report` traces a program. `walk` derives the `facts` about its values and applies
the checks of single operations (`rules`) and of matrix `work`; `report` adds those
of a whole program. `comparison` runs the program and compares it with float32;
`sensitivity` runs it with each product in half precision, by a `probe`.
"""
