"""Is half precision enough for this program?

The report: `walk` applies the `rules` of one operation, the `loops` and the `work`;
`conclusions` has the rules of a whole program, `facts` and `lineage` are about values.
`comparison` runs the program beside float32, `sensitivity` each product by a `probe`.
"""
